"""Arguments of score and top-k kernels: rows of a call, and where their results go."""

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
    """Rows of queries with the keys that each of them sees.

    Attributes:
        q: queries of all heads, [rows, H, _] contiguous.
        q_scales: scale bytes of packed queries, [rows, H, _] contiguous; None if not packed.
        weights: weights of the heads, [rows, H] float32 with unit stride in a row.
        keys: index cache [P, B, row] in ``layout``, or a list of keys [N, D] if ``layout`` is None.
        layout: identifier of the cache's layout; None for a list of keys.
        key_scale: factors of a list's keys, [N] float32 contiguous; None for 1.
        block_table: page ids of each request, [R, pages] int32; None for a list of keys.
        lengths: one past each row's last entry, [rows] int32 contiguous.
        starts: each row's first entry in a list of keys, [rows] int32 contiguous; None for 0.
        requests: each row's request, [rows] int32 contiguous; None for ``rows_per_request`` each.
        rows_per_request: number of rows of each request, if ``requests`` is None.
        first_row: number of the first row within the whole call.
        covered: most entries that any row sees.
        k: number of entries up to which a row is not scored.
        block_size: number of entries, a divisor of a page's, in the blocks that ``block_table``
            lists by their place in the cache; 0 if it lists pages.
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
        """Number of requests; a list of keys counts as one."""
        return 1 if self.block_table is None else len(self.block_table)

    @property
    def neighbours_share_keys(self) -> bool:
        """True if neighbouring rows may share a request, as far as sizes show."""
        if self.requests is None:
            return self.rows_per_request > 1
        return len(self.q) > self.num_requests

    def chunk(self, part: slice) -> ScoreInputs:
        """Return the inputs of a slice of the rows."""
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
    """Result tensors of a selection.

    Attributes:
        out: entries that each row selects, [rows, k] int32.
        slots: slots of the chosen entries, [rows, k] int32; or None.
        counts: number of chosen entries of each row, [rows] int32; or None.
        slot_table: block table that ``slots`` refer to, [R, pages'] int32; or None.
        slot_page_size: number of entries in a page of ``slot_table``.
    """

    out: Tensor
    slots: Tensor | None
    counts: Tensor | None
    slot_table: Tensor | None
    slot_page_size: int

    def chunk(self, part: slice) -> SelectOutputs:
        """Return the outputs of a slice of the rows."""
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
    """Make kernel inputs from the arguments of ``select_topk``."""
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
    """Make kernel inputs from the arguments of ``paged_mqa_logits``."""
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
    """Return x [N, M] with unit stride within rows, copied if necessary."""
    return x if x.stride(1) == 1 else x.contiguous()


def writable(
    given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return ``given`` if kernels can write it (unit stride in a row), else a new tensor."""
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
    """Compute ``mqa_logits`` with a backend's ``write_scores``, passed as ``score``."""
    logits = writable(out, (len(q), len(k)), torch.float32, q.device)
    if logits.numel():
        inputs = ScoreInputs(
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
    """Compute ``paged_mqa_logits`` with a backend's ``write_scores``, passed as ``score``."""
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
