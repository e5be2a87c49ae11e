"""Contract of the whole selection: from the index cache straight to the best entries."""

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops.indexer import device_support, reference_select, torch_select
from anymla.ops.indexer.checks import CODED_Q, check_queries
from anymla.ops.kv_cache.checks import check_cache
from anymla.ops.registry import FLOAT32_UP, INT32, check, operation, require

# What a call takes for itself unless told otherwise (a wave of an H200 at a million tokens), and
# the least it can be told.
SCRATCH_BYTES = 9 << 25
LEAST_SCRATCH_BYTES = 1 << 24


@operation(
    mutates=("out", "slots", "counts"),
    outputs=lambda q, lengths, k, **_: (lengths.new_empty((len(q), k)),),
)
def select_topk(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    *,
    max_context: int | None = None,
    token_to_req: Tensor | None = None,
    starts: Tensor | None = None,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    out: Tensor | None = None,
    slot_table: Tensor | None = None,
    slot_page_size: int = 64,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """The k best entries of every token, exactly, in memory that the caller bounds.

    Token t of request r sees entries ``starts[t] <= w < lengths[t]`` of r, and scores each as
    ``sum_h weights[t, h] * relu(q[t, h] . key(r, w))``, key(r, w) being the decoded entry at slot
    ``block_table[r, w // B] * B + w % B`` (-inf where that page is negative or beyond the cache).
    Chosen are the first k by: higher score first, NaN above +inf, and among equal scores (0 and -0
    are equal, as are NaNs) the lower entry first; -inf is a score like any other. They are listed
    in ascending order, so that a row with at most k entries, which is not scored, lists all of
    them. Scores exist a round of tokens at a time; no result depends on rounds, tiles, or the other
    tokens of the call.

    Args:
        q: [T, Hi, D] floating point or float8_e4m3fn, or [T, Hi, D/2] packed e2m1 with q_scales.
        index_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        weights: [T, Hi] float32 (or float64).
        lengths: [T] int32, one past the last visible entry; clamped to what the block table and
            max_context cover.
        block_table: [R, pages] int32.
        k: any number >= 1.
        max_context: no row sees more entries than this; None for all that the table covers. Work
            and memory follow it, so that nothing has to be read back from a device.
        token_to_req: [T] int32, block-table row of each token; outside [0, R) it selects nothing.
            None where each request has T / R tokens, one request after the other. Tokens of a
            request should be neighbours: they then share the keys that are read.
        starts: [T] int32, first visible entry; None for 0. Results are relative to it.
        layout: layout id of the cache, of D channels.
        q_scales: [T, Hi, D/32] uint8, scale bytes of a packed q.
        scratch_bytes: at most this much memory is allocated beside results, 16 MiB or more.
        out: [T, k] int32 to write into, or None.
        slot_table: [R, pages'] int32, block table of the entries that the keys stand for; needed
            for ``slots``.
        slot_page_size: entries of a page of ``slot_table``.
        slots: [T, k] int32 to be filled with the slots of the chosen entries in ``slot_table``, -1
            behind and where there is no such page; or None.
        counts: [T] int32 to be filled with the number of entries chosen; or None.

    Returns:
        [T, k] int32, ``out`` if given: entries relative to ``starts``, ascending, then -1.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; a packed q without q_scales; k
            below 1; too little scratch, by what a token's scores take; slots without slot_table.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer).
    """
    name = "select_topk"
    require(k >= 1, name, "k", ">= 1", k)
    check(
        name,
        dims={"K": k},
        q=(q, "T H _", CODED_Q),
        weights=(weights, "T H", FLOAT32_UP),
        lengths=(lengths, "T", INT32),
        block_table=(block_table, "R _", INT32),
        token_to_req=(token_to_req, "T", INT32),
        starts=(starts, "T", INT32),
        out=(out, "T K", INT32),
        slot_table=(slot_table, "R _", INT32),
        slots=(slots, "T K", INT32),
        counts=(counts, "T", INT32),
    )
    requests = len(block_table)
    even = token_to_req is not None or (len(q) % requests == 0 if requests else len(q) == 0)
    require(even, name, "token_to_req", f"given for {len(q)} tokens of {requests} requests", None)
    require(max_context is None or max_context >= 0, name, "max_context", ">= 0", max_context)
    width = q.shape[2] * (2 if q.dtype == torch.uint8 else 1)
    check_cache(name, "index_cache", index_cache, layout, channels=width, device=q.device)
    check_queries(name, q, q_scales, width)
    require(slots is None or slot_table is not None, name, "slot_table", "given for slots", None)
    require(slot_page_size >= 1, name, "slot_page_size", ">= 1", slot_page_size)
    entries = block_table.shape[1] * pages_of(index_cache).shape[1]
    context = entries if max_context is None else min(entries, max_context)
    least = max(LEAST_SCRATCH_BYTES, 8 * context)
    require(scratch_bytes >= least, name, "scratch_bytes", f">= {least}", scratch_bytes)


select_topk.register("reference", reference_select.select_topk)
select_topk.register("torch", torch_select.select_topk)
select_topk.register_lazy(
    "triton", "anymla.ops.indexer.triton_select", supports=device_support.select_support
)
select_topk.register_lazy(
    "gluon_sm90", "anymla.ops.indexer.gluon_sm90_select", supports=device_support.hopper_support
)
