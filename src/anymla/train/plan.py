"""Rows and entries that each token of a packed batch sees, worked out once for all its layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.train.windows import Windows


class Plan:
    """Sequences packed side by side, and what their tokens see in layers of one ratio.

    A batch holds sequence after sequence, without padding between them. A token at position i of
    its sequence sees the rows of positions max(0, i - window + 1) .. i, and the entries
    0 .. (i + 1) // ratio - 1 of its sequence. Entries of a sequence of length n are n // ratio,
    and they too stand side by side, sequence after sequence. Layers of one ratio share a plan.
    Nothing here waits for a device.

    Attributes:
        tokens: number of tokens T of the batch, an int.
        ratio: tokens that are compressed into one entry; 0 for layers without entries.
        window: largest number of rows that a token sees, itself included.
        num_entries: number of rows E of the batch's entries: their exact number if the lengths were
            given on the host, else T // ratio, which is enough; the last ones are then unused.
        most_entries: bound of the number of entries that one token sees, an int.
        cu_seqlens: first token of each sequence, and the end of the last one, [B + 1] int32.
        cu_entries: first entry of each sequence, and the end of the last one, [B + 1] int32.
        sequence: number of each token's sequence, [T] int32; B for tokens of no sequence.
        positions: position of each token in its sequence, [T] int32; 0 for tokens of no sequence.
        ranges: rows of the window and entries that each token sees, [T, 4] int32, as
            ``ops.attention.prefill_attention`` takes them over T rows and then E entries. Tokens
            of no sequence see nothing.
        windows: tokens that each entry is pooled from; None for ratio 0.
        lengths: lengths of the sequences if they were given on the host, else None.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        ratio: int = 0,
        window: int = 128,
        *,
        tokens: int | None = None,
        longest: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Work the plan out.

        Args:
            cu_seqlens: first token of each sequence, and the end of the last one: B + 1 ascending
                integers that begin with 0, as FlashAttention's variable-length calls take them. A
                list or a tensor on the CPU is checked; a tensor on another device is not read.
            ratio: tokens that are compressed into one entry, 0 for none.
            window: largest number of rows that a token sees, itself included.
            tokens: number of tokens of the batch; None for the end of the last sequence, which a
                tensor on another device does not tell. Tokens behind it are padding.
            longest: length of the longest sequence, or a bound of it; None for what is known.
            device: device of the plan's tensors; None for that of ``cu_seqlens``.

        Raises:
            TypeError: if ``cu_seqlens`` is not of int32 or int64.
            ValueError: if sizes are negative, or ``cu_seqlens`` does not ascend from 0, or ends
                after ``tokens``, or is on another device and ``tokens`` is not given.
        """
        starts = torch.as_tensor(cu_seqlens)
        if starts.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Plan: cu_seqlens must be int32 or int64, got {starts.dtype}")
        if starts.ndim != 1 or not len(starts):
            raise ValueError(f"Plan: cu_seqlens must be [B + 1], got {list(starts.shape)}")
        if ratio < 0 or window < 1:
            raise ValueError(f"Plan: ratio must be at least 0 and window 1, got {ratio}, {window}")
        exact: int | None = None
        self.lengths: tuple[int, ...] | None = None
        if starts.is_cpu and not torch.compiler.is_compiling():
            ends: list[int] = starts.tolist()
            lengths = [end - start for start, end in itertools.pairwise(ends)]
            if ends[0] != 0 or min(lengths, default=0) < 0:
                raise ValueError(f"Plan: cu_seqlens must ascend from 0, got {ends}")
            tokens = ends[-1] if tokens is None else tokens
            if ends[-1] > tokens:
                raise ValueError(f"Plan: cu_seqlens must end by tokens={tokens}, got {ends[-1]}")
            longest = max(lengths, default=0)
            self.lengths = tuple(lengths)
            exact = sum(length // ratio for length in lengths) if ratio else 0
        if tokens is None:
            raise ValueError("Plan: tokens must be given with cu_seqlens on a device")
        longest = tokens if longest is None else longest

        self.tokens, self.ratio, self.window = tokens, ratio, window
        self.most_entries = longest // ratio if ratio else 0
        self.num_entries = exact if exact is not None else tokens // ratio if ratio else 0
        starts = starts.to(starts.device if device is None else device, torch.int64)
        each = starts.diff() // ratio if ratio else torch.zeros_like(starts[1:])
        entry_starts = torch.cat((torch.zeros_like(starts[:1]), each.cumsum(0)))

        place = torch.arange(tokens, device=starts.device)
        # The first sequence that ends behind a token holds it; empty ones hold nothing.
        sequence = torch.searchsorted(starts[1:].contiguous(), place, right=True)
        used = sequence < len(starts) - 1
        held = sequence.clamp(max=max(len(starts) - 2, 0))
        positions = torch.where(used, place - starts[held], 0)
        count = torch.where(used, (positions + 1).clamp(max=window), 0)
        visible = (
            torch.where(used, (positions + 1) // ratio, 0) if ratio else torch.zeros_like(place)
        )
        ranges = torch.stack((place + 1 - count, count, tokens + entry_starts[held], visible), 1)

        self.cu_seqlens, self.cu_entries = starts.int(), entry_starts.int()
        self.sequence, self.positions = sequence.int(), positions.int()
        self.ranges = ranges.int()
        self.windows = Windows.of(self) if ratio else None
