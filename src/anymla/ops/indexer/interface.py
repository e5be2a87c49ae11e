"""Contracts of the lightning indexer.

    score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])

over index heads h and compressed entries w, of which every token keeps the top k. The sum takes
the weights as they are, of either sign. Source: DeepSeek-V4 reference, inference/model.py
(Indexer); DeepSeek-V3.2-Exp report, "lightning indexer".
"""

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.page_layout import INDEX_FP8
from anymla.formats.pages import pages_of
from anymla.ops._pages import check_cache
from anymla.ops.device import float32_support
from anymla.ops.indexer import support
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    check_cos_sin,
    operation,
    require,
    wide_dtype,
)

# What ``select_topk`` allocates at most unless told otherwise (a wave of an H200 at a million
# tokens), and the least it can be told.
SCRATCH_BYTES = 9 << 25
LEAST_SCRATCH_BYTES = 1 << 24

QUANTISATIONS = ("fp8", "mxfp4", "none")
_QUERY_DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.uint8)


def _query_outputs(
    q: Tensor, weights: Tensor, *, quant: str, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, width = q.shape
    scales = torch.empty(0, dtype=torch.uint8, device=q.device)
    out = q
    if quant == "fp8":
        out = q.to(torch.float8_e4m3fn)
    elif quant == "mxfp4":
        out = q.new_empty((tokens, heads, width // 2), dtype=torch.uint8)
        scales = q.new_empty((tokens, heads, width // MXFP4_BLOCK), dtype=torch.uint8)
    wide = wide_dtype(weights.dtype)
    return torch.empty_like(out), scales, weights.new_empty(weights.shape, dtype=wide)


@operation(outputs=_query_outputs)
def indexer_q_rope_quant(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    quant: str = "fp8",
    hadamard: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the index queries by position, quantise them, and scale the head weights.

    RoPE rotates the last channels of each head (see ``rope``). If ``quant`` is not "none", the
    result is rounded to bfloat16, as keys are. ``hadamard`` then multiplies by the normalised
    Hadamard matrix, which must have been done to the keys too. Then:

    - "fp8": e4m3 codes with one scale for each head, 2^ceil(log2(max(amax, 1e-4) / 448)). The
      scale is multiplied into the weights: relu commutes with it.
    - "mxfp4": e2m1 codes, one scale byte for 32 channels (see ``quantize_mxfp4``).
    - "none": left as they are.

    Args:
        q: [T, Hi, D] floating point.
        weights: [T, Hi] floating point.
        positions: [T] int64; read clamped to the table.
        cos_sin_cache: [L, R] float32 or float64, see ``rope``.
        softmax_scale: D^-0.5, multiplied into the weights.
        head_scale: Hi^-0.5, multiplied into the weights.
        quant: "fp8", "mxfp4" or "none".
        hadamard: transform the queries; D must be a power of two.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        q: [T, Hi, D] float8_e4m3fn, or [T, Hi, D/2] packed uint8, or [T, Hi, D] of q's dtype.
        q_scales: [T, Hi, D/32] uint8 for "mxfp4"; else empty [0].
        weights: [T, Hi] float32 (float64 for float64 weights), scaled.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; unknown quant; D that it cannot take.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer) for rotation and MXFP4; vLLM's
    operation for FP8 with the folded scale.
    """
    name = "indexer_q_rope_quant"
    sizes = check(
        name,
        q=(q, "T H D", FLOATS),
        weights=(weights, "T H", FLOATS),
        positions=(positions, "T", INT64),
    )
    width = sizes["D"]
    check_cos_sin(name, cos_sin_cache, q, width)
    require(quant in QUANTISATIONS, name, "quant", "one of " + ", ".join(QUANTISATIONS), quant)
    blocks = quant != "mxfp4" or width % MXFP4_BLOCK == 0
    require(blocks, name, "q", f"of a multiple of {MXFP4_BLOCK} channels for mxfp4", width)
    power_of_two = not hadamard or width & (width - 1) == 0
    require(power_of_two, name, "q", "of 2^n channels for the Hadamard transform", width)


@operation(
    mutates=("out",),
    outputs=lambda q, k, weights, **_: (
        weights.new_empty((len(q), len(k)), dtype=wide_dtype(q.dtype, weights.dtype)),
    ),
)
def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Index scores of queries against one dense list of keys.

    ``out[m, n] = sum_h weights[m, h] * relu(q[m, h] . k[n] * k_scale[n])`` where
    ``starts[m] <= n < ends[m]``, and -inf elsewhere, whatever the keys hold there.

    Args:
        q: [M, Hi, D] floating point or float8_e4m3fn, or [M, Hi, D/2] packed e2m1 with q_scales.
        k: [N, D] floating point or float8_e4m3fn, keys of all requests one after the other.
        k_scale: [N] float32 above 0, as quantisers make it, or None for 1.
        weights: [M, Hi] float32 (or float64).
        starts: [M] int32, first key of the row's request.
        ends: [M] int32, one past the last visible key; bounds outside [0, N] are clamped.
        q_scales: [M, Hi, D/32] uint8, scale bytes of a packed q.
        out: [M, N] to write into, or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [M, N] float32 (float64 if q or weights is), ``out`` if given. Products, head sums and
        accumulation in that precision; where a backend gives FP8 operands to a device's FP8
        product, its sums are what they are there (Hopper: 13 bits below the largest product).

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; a packed q without q_scales.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments as DeepGEMM's
    fp8_mqa_logits.
    """
    name = "mqa_logits"
    sizes = check(
        name,
        q=(q, "M H _", _QUERY_DTYPES),
        k=(k, "N D", (*FLOATS, torch.float8_e4m3fn)),
        k_scale=(k_scale, "N", torch.float32),
        weights=(weights, "M H", FLOAT32_UP),
        starts=(starts, "M", INT32),
        ends=(ends, "M", INT32),
    )
    check(
        name,
        dims=sizes,
        out=(out, "M N", wide_dtype(q.dtype, weights.dtype)),
        q=(q, "M H _", _QUERY_DTYPES),
    )
    _check_queries(name, q, q_scales, sizes["D"])


@operation(
    mutates=("out",),
    outputs=lambda q, weights, *, max_context, **_: (
        weights.new_empty(
            (q.shape[0] * q.shape[1], max_context), dtype=wide_dtype(q.dtype, weights.dtype)
        ),
    ),
)
def paged_mqa_logits(
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
    backend: str | None = None,
) -> Tensor:
    """Index scores of every request's queries against its own entries in a paged cache.

    ``out[r * J + j, w] = sum_h weights[r * J + j, h] * relu(q[r, j, h] . key(r, w))`` for
    ``w < context_lens[r, j]``, else -inf. key(r, w) is the decoded entry at slot
    ``block_table[r, w // B] * B + w % B``. An entry beyond the block table, or on a page that is
    negative or beyond the cache, is absent: its score is -inf. Nothing outside the cache is read.

    Args:
        q: [R, J, Hi, D] floating point or float8_e4m3fn, or [R, J, Hi, D/2] packed e2m1 with
            q_scales. Plain queries go with any layout.
        index_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        weights: [R * J, Hi] float32 (or float64).
        context_lens: [R] or [R, J] int32, visible entries (not tokens); [R] holds for all J rows.
        block_table: [R, pages] int32.
        max_context: columns of the result; a row sees no more entries than that.
        layout: layout id of the cache, of D channels.
        q_scales: [R, J, Hi, D/32] uint8, scale bytes of a packed q.
        out: [R * J, max_context] to write into, or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [R * J, max_context] float32 (float64 if q or weights is), ``out`` if given. Scratch is
        bounded whatever the sizes. On a CPU the work follows the lengths, elsewhere max_context,
        without waiting for the device.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; a packed q without q_scales;
            max_context below 0.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments as DeepGEMM's
    fp8_paged_mqa_logits.
    """
    name = "paged_mqa_logits"
    per_request = getattr(context_lens, "ndim", 1) == 1
    check(
        name,
        q=(q, "R J H _", _QUERY_DTYPES),
        weights=(weights, "_ H", FLOAT32_UP),
        context_lens=(context_lens, "R" if per_request else "R J", INT32),
        block_table=(block_table, "R _", INT32),
    )
    require(max_context >= 0, name, "max_context", ">= 0", max_context)
    check(
        name,
        dims={"R*J": q.shape[0] * q.shape[1], "C": max_context},
        weights=(weights, "R*J _", FLOAT32_UP),
        out=(out, "R*J C", wide_dtype(q.dtype, weights.dtype)),
    )
    width = q.shape[3] * (2 if q.dtype == torch.uint8 else 1)
    check_cache(name, "index_cache", index_cache, layout, channels=width, device=q.device)
    _check_queries(name, q, q_scales, width)


@operation(
    mutates=("out",),
    outputs=lambda logits, starts, ends, k, out=None: (starts.new_empty((len(logits), k)),),
)
def topk_per_row(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Indices of the top-k scores of each row, exactly.

    Of the columns ``starts[m] <= n < ends[m]``, the first k in this order: higher score first, NaN
    above +inf, and among equal scores (0 and -0 are equal, as are NaNs) the lower index first. A
    row with at most k columns lists all of them; -inf is a score like any other.

    Args:
        logits: [M, N] float32 or float64; columns outside [starts, ends) may hold anything.
        starts: [M] int32.
        ends: [M] int32; bounds outside [0, N] are clamped.
        k: any number >= 1.
        out: [M, k] int32 to write into, or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [M, k] int32, ``out`` if given: indices relative to ``starts``, best first, then -1.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; k below 1.
    """
    name = "topk_per_row"
    require(k >= 1, name, "k", ">= 1", k)
    check(
        name,
        dims={"K": k},
        logits=(logits, "M N", FLOAT32_UP),
        starts=(starts, "M", INT32),
        ends=(ends, "M", INT32),
        out=(out, "M K", INT32),
    )


@operation(
    outputs=lambda logits, lengths, count, block_size: (lengths.new_empty((len(logits), count)),)
)
def select_candidate_blocks(
    logits: Tensor, lengths: Tensor, count: int, *, block_size: int, backend: str | None = None
) -> Tensor:
    """The blocks of entries that later layers select within: those of the highest scores.

    Block b holds the columns ``b * block_size <= n < (b + 1) * block_size``; its score is the
    highest of its columns ``n < lengths[m]``. The block of the last such column is kept whatever
    its score. The others are kept in the order of ``topk_per_row``, unless their score is -inf.

    Args:
        logits: [M, N] float32 or float64; columns from ``lengths`` on may hold anything.
        lengths: [M] int32, visible entries; clamped to [0, N].
        count: blocks to keep, >= 1.
        block_size: entries of a block, >= 1.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [M, count] int32: numbers of blocks, ascending, then -1.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; count or block_size below 1.

    Source: DeepSeek-V4.1 reference, inference/model.py (Indexer).
    """
    name = "select_candidate_blocks"
    require(count >= 1, name, "count", ">= 1", count)
    require(block_size >= 1, name, "block_size", ">= 1", block_size)
    check(name, logits=(logits, "M N", FLOAT32_UP), lengths=(lengths, "M", INT32))


@operation(mutates=("logits",))
def mask_candidates(
    logits: Tensor, blocks: Tensor, *, block_size: int, backend: str | None = None
) -> None:
    """Hide the scores outside of each row's blocks: they become -inf.

    Args:
        logits: [M, N] float32 or float64; written.
        blocks: [M, B] int32, numbers of blocks in any order; others than 0 .. ceil(N / block_size)
            - 1 name none.
        block_size: entries of a block, >= 1.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; block_size below 1.
    """
    name = "mask_candidates"
    require(block_size >= 1, name, "block_size", ">= 1", block_size)
    check(name, logits=(logits, "M N", FLOAT32_UP), blocks=(blocks, "M _", INT32))


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
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    out: Tensor | None = None,
    slot_table: Tensor | None = None,
    slot_page_size: int = 64,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 8,
    backend: str | None = None,
) -> Tensor:
    """Top-k index entries of every token, exactly, in memory that the caller bounds.

    Token t of request r sees entries ``0 <= w < lengths[t]`` of r, and scores each as
    ``sum_h weights[t, h] * relu(q[t, h] . key(r, w))``, key(r, w) being the decoded entry at slot
    ``block_table[r, w // B] * B + w % B`` (-inf where that page is negative or beyond the cache).
    Chosen are the first k by: higher score first, NaN above +inf, and among equal scores (0 and -0
    are equal, as are NaNs) the lower entry first; -inf is a score like any other. They are listed
    in ascending order, so that a row with at most k entries, which is not scored, lists all of
    them. Scores exist a chunk of tokens at a time; no result depends on chunks, tiles, or the other
    tokens of the call.

    With ``blocks``, token t sees those of its entries alone that lie in the blocks of its list, and
    of these the blocks whose page there is. Block b holds ``b * block_size <= w < (b + 1) *
    block_size``. Keys of other blocks are not scored: work follows the lists, not the context.

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
        blocks: [T, B] int32, numbers of blocks, distinct and ascending, then -1, as
            ``select_candidate_blocks`` gives them; numbers behind the last entry name none. None:
            all entries are seen.
        block_size: entries of a block, a divisor of the entries of a page.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        [T, k] int32, ``out`` if given: entries, ascending, then -1.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; a packed q without q_scales; k
            below 1; too little scratch, by what a token's scores take; slots without slot_table;
            blocks that do not divide a page.

    Source: DeepSeek-V4 and V4.1 references, inference/model.py (Indexer).
    """
    name = "select_topk"
    require(k >= 1, name, "k", ">= 1", k)
    check(
        name,
        dims={"K": k},
        q=(q, "T H _", _QUERY_DTYPES),
        weights=(weights, "T H", FLOAT32_UP),
        lengths=(lengths, "T", INT32),
        block_table=(block_table, "R _", INT32),
        token_to_req=(token_to_req, "T", INT32),
        out=(out, "T K", INT32),
        slot_table=(slot_table, "R _", INT32),
        slots=(slots, "T K", INT32),
        counts=(counts, "T", INT32),
        blocks=(blocks, "T _", INT32),
    )
    requests = len(block_table)
    even = token_to_req is not None or (len(q) % requests == 0 if requests else len(q) == 0)
    require(even, name, "token_to_req", f"given for {len(q)} tokens of {requests} requests", None)
    require(max_context is None or max_context >= 0, name, "max_context", ">= 0", max_context)
    width = q.shape[2] * (2 if q.dtype == torch.uint8 else 1)
    check_cache(name, "index_cache", index_cache, layout, channels=width, device=q.device)
    _check_queries(name, q, q_scales, width)
    require(slots is None or slot_table is not None, name, "slot_table", "given for slots", None)
    require(slot_page_size >= 1, name, "slot_page_size", ">= 1", slot_page_size)
    page = pages_of(index_cache).shape[1]
    divides = blocks is None or (block_size >= 1 and page % block_size == 0)
    require(divides, name, "block_size", f"a divisor of {page}, the entries of a page", block_size)
    entries = block_table.shape[1] * page
    context = entries if max_context is None else min(entries, max_context)
    least = max(LEAST_SCRATCH_BYTES, 8 * context)
    require(scratch_bytes >= least, name, "scratch_bytes", f">= {least}", scratch_bytes)


def _check_queries(name: str, q: Tensor, q_scales: Tensor | None, width: int) -> None:
    """Queries [.., H, _] must have ``width`` channels, and packed ones their scale bytes.

    Raises:
        TypeError, ValueError: they do not.
    """
    packed = q.dtype == torch.uint8
    require(
        q.shape[-1] == (width // 2 if packed else width),
        name,
        "q",
        f"of {width} channels" + (" (two to a byte)" if packed else ""),
        list(q.shape),
    )
    if packed:
        require(q_scales is not None, name, "q_scales", "given for a packed q", None)
        spec = "M H S" if q.ndim == 3 else "R J H S"
        sizes = {"S": width // MXFP4_BLOCK, **dict(zip(spec.split(), q.shape[:-1], strict=False))}
        check(name, dims=sizes, q_scales=(q_scales, spec, torch.uint8))


_FAMILY = "anymla.ops.indexer"
_SM90 = f"{_FAMILY}.gluon_sm90_launch"
for _operation, _kernel in (
    (indexer_q_rope_quant, "query"),
    (mqa_logits, "scores"),
    (paged_mqa_logits, "scores"),
    (topk_per_row, "select"),
    (select_topk, "select"),
    (select_candidate_blocks, "candidates"),
    (mask_candidates, "candidates"),
):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_{_kernel}")

for _operation, _kernel, _supports in (
    (indexer_q_rope_quant, "query", support.query_support),
    (mqa_logits, "scores", support.dense_support),
    (paged_mqa_logits, "scores", support.paged_support),
    (topk_per_row, "topk", float32_support),
    (select_candidate_blocks, "candidates", support.candidates_support),
    (mask_candidates, "candidates", support.candidates_support),
    (select_topk, "select", support.select_support),
):
    _operation.register_lazy("triton", f"{_FAMILY}.triton_{_kernel}", supports=_supports)
mqa_logits.register_lazy("gluon_sm90", _SM90, supports=support.sm90_dense_support)
paged_mqa_logits.register_lazy("gluon_sm90", _SM90, supports=support.sm90_paged_support)
select_topk.register_lazy("gluon_sm90", _SM90, supports=support.sm90_select_support)
