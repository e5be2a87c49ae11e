"""Sequences of a batch: its real tokens, side by side, and the rows that each of them sees.

A batch [B, S] of transformers may hold padding on either side, and several sequences in one row
whose position ids restart. Layers work on its real tokens alone, side by side:

    tokens   | sequence 0 ........ | sequence 1 ... | ..
    rows     | kept | sequence 0 . | kept | sequence 1 ... | ..     kept: from the cache, at most
    entries  | kept | new | kept | new | ..                         window - 1 rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from anymla import train

PAGE = 64  # entries in a page of index keys


@dataclasses.dataclass
class Kept:
    """The sequence that a row of the batch ends with, as far as later tokens need it.

    Attributes:
        length: number of its tokens so far.
        first: position id of its first token.
        tensors: its rows of the window [n, D], its compressed entries [n, D] and index keys, and
            projections [n, D] of the tokens that later windows pool, by name; without gradients.
    """

    length: int
    first: int
    tensors: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive real tokens of a batch that belong to one sequence.

    Attributes:
        row: row of the batch.
        tokens: number of tokens.
        past: number of the sequence's tokens before them.
        first: position id of the sequence's first token.
    """

    row: int
    tokens: int
    past: int
    first: int

    @property
    def length(self) -> int:
        """Number of the sequence's tokens so far."""
        return self.past + self.tokens


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of ``ratio`` tokens that a batch closes, and the entries that its tokens see.

    Attributes:
        ratio: number of tokens in a window, which become one entry; 0 for no entries.
        members: tokens of each closed window, [W, ratio], counted among the projections of the
            kept and the new tokens of all sequences.
        before: members of the window before each, [W, ratio]; of no meaning where ``alone``.
        alone: True for the first window of a sequence, [W, 1, 1].
        positions: position id of each window's first token, [W].
        closed: number of windows that each sequence closes.
        pending: number of last tokens of each sequence that later windows pool.
        entries: number of entries of each sequence.
        most: largest number of entries of a sequence.
        ranges: rows and entries that each token sees, [T, 4] int32, as ``prefill_attention`` takes
            them over all rows and then all entries.
        visible: number of entries that each token sees, [T] int32.
        block_table: pages of index keys of each sequence, [R, pages] int32.
    """

    ratio: int
    members: Tensor
    before: Tensor
    alone: Tensor
    positions: Tensor
    closed: list[int]
    pending: list[int]
    entries: list[int]
    most: int
    ranges: Tensor
    visible: Tensor
    block_table: Tensor


class Plan:
    """The real tokens of a batch, which all layers share.

    Attributes:
        spans: the sequences' new tokens, in the order of the batch.
        cu_seqlens: first token of each span, and the end of the last one.
        owner: number of each token's span, [T] int32.
    """

    def __init__(
        self,
        positions: Tensor,
        mask: Tensor | None,
        window: int,
        kept: Sequence[Kept | None],
    ) -> None:
        """Find the sequences.

        Args:
            positions: position ids [B, S] of the tokens, in each row ascending within a sequence.
            mask: True for real tokens, [B, S]; None for no padding.
            window: largest number of rows that a token sees, itself included.
            kept: tensors that the cache holds of each row of the batch; empty if it holds nothing.

        Raises:
            ValueError: the position ids of a sequence leave some out.
        """
        self.device, self.window, self.shape = positions.device, window, positions.shape
        ids, length = positions.long().cpu().flatten(), positions.shape[1]
        real = torch.arange(len(ids)) if mask is None else mask.cpu().flatten().nonzero().flatten()
        self._real = None if len(real) == len(ids) else real.to(self.device)

        ids, row = ids[real], real // length
        edge = torch.diff(row, prepend=torch.tensor([-1])) > 0
        step = torch.diff(ids, prepend=torch.zeros(1, dtype=torch.int64))
        begins = (edge | (step <= 0)).nonzero().flatten().tolist()
        leaps = (~edge & (step > 1)).nonzero().flatten().tolist()
        spans = []
        for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
            r, first = int(row[begin]), int(ids[begin])
            before = kept[r] if kept and bool(edge[begin]) else None
            if before is None:
                spans.append(Span(r, end - begin, 0, first))
                continue
            if first != before.first + before.length:
                leaps.append(begin)
            spans.append(Span(r, end - begin, before.length, before.first))
        if leaps:
            at = leaps[0]
            raise ValueError(
                f"position_ids of row {int(row[at])} go on at {int(ids[at])}, not with the number "
                "after the last real token's: pad on the left, or pass position_ids that leave "
                "padding out (attention_mask.cumsum(-1) - 1)"
            )
        self.spans = spans
        counts = [span.tokens for span in spans]
        self.cu_seqlens = [0, *accumulate(counts)]
        self._owner = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts))
        self.owner = self._owner.int().to(self.device)
        past = self._each(s.past - begin for s, begin in zip(spans, begins, strict=True))
        self._at = torch.arange(len(ids)) + past  # position in the sequence
        self._windows: dict[tuple[int, bool], Windows] = {}
        self._training: dict[int, train.Plan] = {}

    def _each(self, of_spans: Iterable[int]) -> Tensor:
        """Return a number of each span for each of its tokens, [T] int64 on the host."""
        return torch.tensor(list(of_spans), dtype=torch.int64)[self._owner]

    def training(self, ratio: int) -> train.Plan:
        """Return the plan by which layers of a ratio attend with gradients."""
        if ratio not in self._training:
            self._training[ratio] = train.Plan(
                self.cu_seqlens, ratio, self.window, device=self.device
            )
        return self._training[ratio]

    def real(self, x: Tensor) -> Tensor:
        """Return the real tokens [1, T, ..] of a batch [B, S, ..], or of a [1, S, ..] for all."""
        x = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)
        return (x if self._real is None else x.index_select(0, self._real)).unsqueeze(0)

    def padded(self, x: Tensor) -> Tensor:
        """Return real tokens [1, T, D] as a batch [B, S, D] with zeros for padding."""
        if self._real is not None:
            x = x.new_zeros(self.shape.numel(), x.shape[-1]).index_copy(0, self._real, x[0])
        return x.view(*self.shape, -1)

    def windows(self, ratio: int, overlap: bool) -> Windows:
        """Return the windows of layers of a ratio, 0 for none.

        Args:
            ratio: number of tokens in a window, which become one entry.
            overlap: True if an entry also pools the window before.
        """
        key = ratio, overlap
        if key not in self._windows:
            self._windows[key] = self._find_windows(ratio, overlap)
        return self._windows[key]

    def _find_windows(self, ratio: int, overlap: bool) -> Windows:
        spans, at, device = self.spans, self._at, self.device
        lengths = [s.length for s in spans]
        low = (at - self.window + 1).clamp(min=0)
        rows_kept = [min(s.past, self.window - 1) for s in spans]
        rows = [0, *accumulate(k + s.tokens for k, s in zip(rows_kept, spans, strict=True))]
        at_row = self._each(b + k - s.past for b, k, s in zip(rows, rows_kept, spans, strict=False))
        entries = [n // ratio if ratio else 0 for n in lengths]
        entry_begin = [rows[-1] + n for n in (0, *accumulate(entries))]
        visible = (at + 1) // ratio if ratio else torch.zeros_like(at)
        entry_at = self._each(entry_begin[: len(spans)])
        ranges = torch.stack((at_row + low, at - low + 1, entry_at, visible), 1)

        opened = [s.past // ratio if ratio else 0 for s in spans]
        pooled_from = [_pending(s.past, ratio, overlap) for s in spans]
        buffers = [0, *accumulate(k + s.tokens for k, s in zip(pooled_from, spans, strict=True))]
        numbers = [torch.arange(o, e) for o, e in zip(opened, entries, strict=True)]
        starts = [
            begin + k - s.past + number * ratio
            for begin, k, s, number in zip(buffers, pooled_from, spans, numbers, strict=False)
        ]
        none = [torch.zeros(0, dtype=torch.int64)]
        members = torch.cat(none + starts)[:, None] + torch.arange(ratio)
        positions = [s.first + number * ratio for s, number in zip(spans, numbers, strict=True)]
        alone = torch.cat(none + numbers) == 0

        pages = [0, *accumulate(-(-n // PAGE) for n in entries)]
        widest = max((b - a for a, b in pairwise(pages)), default=0)
        table = torch.tensor(pages[:-1])[:, None] + torch.arange(widest)
        return Windows(
            ratio=ratio,
            members=members.to(device),
            before=(members - ratio).clamp(min=0).to(device),
            alone=alone[:, None, None].to(device),
            positions=torch.cat(none + positions).to(device),
            closed=[len(number) for number in numbers],
            pending=[_pending(n, ratio, overlap) for n in lengths],
            entries=entries,
            most=max(entries, default=0),
            ranges=ranges.int().to(device),
            visible=visible.int().to(device),
            block_table=table.int().to(device),
        )


def _pending(length: int, ratio: int, overlap: bool) -> int:
    """Return how many of a sequence's last tokens are in windows that later entries pool."""
    if not ratio:
        return 0
    return length % ratio + (ratio if overlap and length >= ratio else 0)


class Batch:
    """Mask of a batch as the layers get it, and the plan that the first of them makes."""

    def __init__(self, mask: Tensor | None) -> None:
        """Take the mask of the new tokens and maybe of earlier ones before them.

        Args:
            mask: nonzero for real tokens, [B, S or more]; None for no padding.
        """
        self._mask = mask
        self._plan: Plan | None = None

    def plan(
        self, position_ids: Tensor, rows: int, window: int, kept: Sequence[Kept | None]
    ) -> Plan:
        """Return the plan of a batch of ``rows`` rows; see ``Plan`` for the arguments.

        Layers of a model see the same tokens, so the first layer's plan is everybody's.

        Raises:
            ValueError: the mask is of another shape, or position ids leave some out.
        """
        if self._plan is None:
            mask, tokens = self._mask, position_ids.shape[-1]
            if mask is not None:
                if mask.ndim != 2 or len(mask) != rows or mask.shape[1] < tokens:
                    raise ValueError(
                        f"attention_mask must be [batch, tokens], for {rows} rows of at least "
                        f"{tokens} tokens, got {list(mask.shape)}"
                    )
                mask = mask[:, mask.shape[1] - tokens :]
            self._plan = Plan(position_ids.expand(rows, -1), mask, window, kept)
        return self._plan
