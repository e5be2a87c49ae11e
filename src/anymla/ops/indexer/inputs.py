"""What score and top-k kernels are given: some rows of a call, and where their results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops import device as device_facts


@dataclasses.dataclass(frozen=True)
class ScoreInputs:
    """Rows of queries, and the keys that each of them sees.

    Attributes:
        q: [rows, H, _] contiguous.
        q_scales: [rows, H, _] contiguous, scale bytes of packed queries; or None.
        weights: [rows, H] float32, heads side by side.
        keys: index cache [P, B, row] in ``layout``, or a list [N, D] without a layout.
        layout: layout id, or None.
        key_scale: [N] float32 contiguous, of a list; or None for 1.
        block_table: [R, pages] int32, or None for a list.
        lengths: [rows] int32 contiguous, one past a row's last entry.
        starts: [rows] int32 contiguous, a row's first entry, of a list; None for 0.
        requests: [rows] int32 contiguous, a row's request; None for ``rows_per_request`` of each.
        rows_per_request: see above.
        first_row: number of the first row in the whole call.
        covered: entries that there are to see.
        k: a row of at most so many entries is not scored.
        block_size: ``block_table`` lists blocks of so many entries, which divide a page, by their
            places in the cache; 0: it lists pages.
    """

    q: Tensor
    q_scales: Tensor | None
    weights: Tensor
    keys: Tensor
    layout: str | None
    key_scale: Tensor | None
    block_table: Tensor | None
    lengths: Tensor
    starts: Tensor | None
    requests: Tensor | None
    rows_per_request: int
    first_row: int
    covered: int
    k: int
    block_size: int = 0

    @property
    def num_requests(self) -> int:
        """Requests of the call; a list is one."""
        return 1 if self.block_table is None else len(self.block_table)

    @property
    def neighbours_share_keys(self) -> bool:
        """Neighbouring rows are of one request, as far as sizes tell."""
        if self.requests is None:
            return self.rows_per_request > 1
        return len(self.q) > self.num_requests

    def chunk(self, part: slice) -> ScoreInputs:
        """Some of the rows."""
        return dataclasses.replace(
            self,
            q=self.q[part],
            q_scales=None if self.q_scales is None else self.q_scales[part],
            weights=self.weights[part],
            lengths=self.lengths[part],
            starts=None if self.starts is None else self.starts[part],
            requests=None if self.requests is None else self.requests[part],
            first_row=self.first_row + part.start,
        )


@dataclasses.dataclass(frozen=True)
class SelectOutputs:
    """Where a selection goes.

    Attributes:
        out: [rows, k] int32.
        slots: [rows, k] int32, or None.
        counts: [rows] int32, or None.
        slot_table: [R, pages'] int32, which ``slots`` need.
        slot_page_size: entries of a page of ``slot_table``.
    """

    out: Tensor
    slots: Tensor | None
    counts: Tensor | None
    slot_table: Tensor | None
    slot_page_size: int

    def chunk(self, part: slice) -> SelectOutputs:
        """Those of some rows."""
        return dataclasses.replace(
            self,
            out=self.out[part],
            slots=None if self.slots is None else self.slots[part],
            counts=None if self.counts is None else self.counts[part],
        )


def select_inputs(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    index_cache: Tensor,
    layout: str,
    block_table: Tensor,
    lengths: Tensor,
    token_to_req: Tensor | None,
    max_context: int | None,
    k: int,
) -> ScoreInputs:
    """The inputs of ``select_topk``, arguments as there."""
    requests = len(block_table)
    covered = block_table.shape[1] * pages_of(index_cache).shape[1]
    return ScoreInputs(
        q.contiguous(),
        None if q_scales is None else q_scales.contiguous(),
        unit_stride(weights),
        index_cache,
        layout,
        None,
        block_table,
        lengths.contiguous(),
        None,
        None if token_to_req is None else token_to_req.contiguous(),
        len(q) // requests if requests and token_to_req is None else 1,
        0,
        covered if max_context is None else min(covered, max_context),
        k,
    )


def dense_inputs(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    starts: Tensor,
    ends: Tensor,
) -> ScoreInputs:
    """The inputs of ``mqa_logits``, arguments as there."""
    return ScoreInputs(
        q.contiguous(),
        None if q_scales is None else q_scales.contiguous(),
        unit_stride(weights),
        unit_stride(k),
        None,
        None if k_scale is None else k_scale.contiguous(),
        None,
        ends.contiguous(),
        starts.contiguous(),
        None,
        len(q),
        0,
        len(k),
        0,
    )


def paged_inputs(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    index_cache: Tensor,
    layout: str,
    context_lens: Tensor,
    block_table: Tensor,
    max_context: int,
) -> ScoreInputs:
    """The inputs of ``paged_mqa_logits``, arguments as there."""
    requests, rows = q.shape[:2]
    lengths = context_lens if context_lens.ndim == 2 else context_lens.unsqueeze(1)
    return ScoreInputs(
        q.flatten(0, 1).contiguous(),
        None if q_scales is None else q_scales.flatten(0, 1).contiguous(),
        unit_stride(weights),
        index_cache,
        layout,
        None,
        block_table,
        lengths.expand(requests, rows).reshape(-1).contiguous(),
        None,
        None,
        rows,
        0,
        min(max_context, block_table.shape[1] * pages_of(index_cache).shape[1]),
        0,
    )


def unit_stride(x: Tensor) -> Tensor:
    """Rows x [N, M] with neighbours side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def writable(
    given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The caller's tensor where kernels can write it, else a new one."""
    if given is not None and given.stride(1) == 1:
        return given
    return torch.empty(shape, dtype=dtype, device=device)


def dense_logits(
    score: Callable[..., None],
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``interface.mqa_logits`` by a backend's ``write_scores``."""
    logits = writable(out, (len(q), len(k)), torch.float32, q.device)
    if logits.numel():
        inputs = dense_inputs(q, q_scales, weights, k, k_scale, starts, ends)
        score(inputs, logits, None, device_facts.target_of(q.device), context=len(k))
    return logits if out is None or out is logits else out.copy_(logits)


def paged_logits(
    score: Callable[..., None],
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context: int,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``interface.paged_mqa_logits`` by a backend's ``write_scores``."""
    shape = (q.shape[0] * q.shape[1], max_context)
    logits = writable(out, shape, torch.float32, q.device)
    if not len(index_cache):
        logits.fill_(-torch.inf)
    elif logits.numel():
        inputs = paged_inputs(
            q, q_scales, weights, index_cache, layout, context_lens, block_table, max_context
        )
        score(inputs, logits, None, device_facts.target_of(q.device), context=max_context)
    return logits if out is None or out is logits else out.copy_(logits)
