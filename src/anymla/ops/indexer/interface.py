"""Contracts of the lightning indexer.

    score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])

over index heads h and compressed entries w, of which every token keeps the top k. Weights of either
sign enter the sum unchanged. Source: DeepSeek-V4 reference, inference/model.py (Indexer);
DeepSeek-V3.2-Exp report, "lightning indexer".
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

# Default limit in bytes of what ``select_topk`` allocates (a wave of an H200 at a million tokens),
# and the smallest limit that callers may set.
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
    result is rounded to bfloat16, as keys are. ``hadamard`` then multiplies it by the normalised
    Hadamard matrix, by which the keys must have been multiplied too. Finally, by ``quant``:

    - "fp8": e4m3 codes with one scale for each head, 2^ceil(log2(max(amax, 1e-4) / 448)). The scale
      is multiplied into the weights, which is exact since relu commutes with it.
    - "mxfp4": e2m1 codes, one scale byte for 32 channels (see ``quantize_mxfp4``).
    - "none": the queries are left as they are.

    Args:
        q: index queries of all heads, [T, Hi, D] floating point.
        weights: weights of the heads, [T, Hi] floating point.
        positions: positions of the tokens, [T] int64; clamped to the table.
        cos_sin_cache: rotary table, [L, R] float32 or float64, see ``rope``.
        softmax_scale: factor multiplied into the weights, D^-0.5.
        head_scale: factor multiplied into the weights, Hi^-0.5.
        quant: format of the returned queries, "fp8", "mxfp4" or "none".
        hadamard: True to transform the queries; D must then be a power of two.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        q: queries as [T, Hi, D] float8_e4m3fn, [T, Hi, D/2] packed uint8, or [T, Hi, D] of q's
            dtype.
        q_scales: ue8m0 scale bytes for "mxfp4", [T, Hi, D/32] uint8; else an empty [0].
        weights: scaled weights, [T, Hi] float32 (float64 for float64 weights).

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, quant is unknown, or D is not
            allowed.

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
    """Score queries against one dense list of keys.

    ``out[m, n] = sum_h weights[m, h] * relu(q[m, h] . k[n] * k_scale[n])`` where
    ``starts[m] <= n < ends[m]``, and -inf elsewhere, whatever the keys hold there.

    Args:
        q: queries, [M, Hi, D] floating point or float8_e4m3fn, or [M, Hi, D/2] packed e2m1 with
            q_scales.
        k: keys of all requests one after the other, [N, D] floating point or float8_e4m3fn.
        k_scale: positive factors of the keys, as quantisers make them, [N] float32; None for 1.
        weights: weights of the heads, [M, Hi] float32 (or float64).
        starts: first key of the row's request, [M] int32.
        ends: one past the last visible key, [M] int32; bounds outside [0, N] are clamped.
        q_scales: ue8m0 scale bytes of a packed q, [M, Hi, D/32] uint8.
        out: scores to write into, [M, N]; None to allocate them.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Scores [M, N], float32 (float64 if q or weights is), ``out`` if given. Products, sums over
        channels and sums over heads have that precision. Where a backend uses a device's FP8
        instruction, its sums have the instruction's precision (Hopper: 13 bits below the largest
        product).

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or a packed q has no q_scales.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments follow DeepGEMM's
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
    """Score every request's queries against its own entries in a paged cache.

    ``out[r * J + j, w] = sum_h weights[r * J + j, h] * relu(q[r, j, h] . key(r, w))`` for
    ``w < context_lens[r, j]``, else -inf. key(r, w) is the decoded entry at slot
    ``block_table[r, w // B] * B + w % B``. An entry beyond the block table, or on a page that is
    negative or beyond the cache, is absent: its score is -inf. Nothing outside the cache is read.

    Args:
        q: queries, [R, J, Hi, D] floating point or float8_e4m3fn, or [R, J, Hi, D/2] packed e2m1
            with q_scales. Plain queries are allowed with any layout.
        index_cache: index keys, [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        weights: weights of the heads, [R * J, Hi] float32 (or float64).
        context_lens: number of visible entries (not tokens), [R, J] int32, or [R] for all J rows.
        block_table: page ids of each request in order, [R, pages] int32.
        max_context: number of columns of the result; a row sees at most as many entries.
        layout: identifier of the cache's layout, whose rows have D channels.
        q_scales: ue8m0 scale bytes of a packed q, [R, J, Hi, D/32] uint8.
        out: scores to write into, [R * J, max_context]; None to allocate them.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Scores [R * J, max_context], float32 (float64 if q or weights is), ``out`` if given. Scratch
        memory is bounded for all sizes. The work follows the lengths on a CPU; elsewhere it follows
        max_context, so that nothing waits for the device.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong, a packed q has no
            q_scales, or max_context is negative.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments follow DeepGEMM's
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
    """Find the indices of the top-k scores of each row, exactly.

    Of the columns ``starts[m] <= n < ends[m]``, the first k are taken in this order: higher score
    first, NaN above +inf, and the lower index first among equal scores (0 and -0 are equal, and all
    NaNs are). A row with at most k columns lists all of them; -inf is a score like any other.

    Args:
        logits: scores, [M, N] float32 or float64; columns outside [starts, ends) may hold anything.
        starts: first column of each row, [M] int32.
        ends: one past the last column of each row, [M] int32; bounds outside [0, N] are clamped.
        k: number of scores to take, at least 1.
        out: indices to write into, [M, k] int32; None to allocate them.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Indices relative to ``starts``, best first, then -1: [M, k] int32, ``out`` if given.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or k is below 1.
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
    """Choose the blocks of entries with the highest scores, within which later layers select.

    Block b holds the columns ``b * block_size <= n < (b + 1) * block_size``; its score is the
    highest of its columns ``n < lengths[m]``. The block of the last visible column is always kept.
    The others are kept in the order of ``topk_per_row``, unless their score is -inf.

    Args:
        logits: scores, [M, N] float32 or float64; columns from ``lengths`` on may hold anything.
        lengths: number of visible entries of each row, [M] int32; clamped to [0, N].
        count: number of blocks to keep, at least 1.
        block_size: number of entries in a block, at least 1.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Numbers of the kept blocks, ascending, then -1: [M, count] int32.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or count or block_size is below
            1.

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
    """Set the scores outside each row's blocks to -inf, in place.

    Args:
        logits: scores to mask in place, [M, N] float32 or float64.
        blocks: numbers of blocks in any order, [M, B] int32; numbers outside 0 .. ceil(N /
            block_size) - 1 are ignored.
        block_size: number of entries in a block, at least 1.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or block_size is below 1.
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
    """Select every token's top-k index entries, exactly, in memory that the caller bounds.

    Token t of request r sees entries ``0 <= w < lengths[t]`` of r, and scores each as ``sum_h
    weights[t, h] * relu(q[t, h] . key(r, w))``, key(r, w) being the decoded entry at slot
    ``block_table[r, w // B] * B + w % B`` (-inf if that page is negative or beyond the cache). The
    first k entries are chosen in this order: higher score first, NaN above +inf, and the lower
    entry first among equal scores (0 and -0 are equal, and all NaNs are); -inf is a score like any
    other. Chosen entries are listed in ascending order, so a row with at most k entries lists all
    of them and is not scored. Scores exist for a chunk of tokens at a time; no result depends on
    chunks, tiles, or the call's other tokens.

    With ``blocks``, token t only sees entries in the blocks of its list, and of these blocks only
    those whose page exists. Block b holds ``b * block_size <= w < (b + 1) * block_size``. Keys of
    other blocks are not scored: work follows the lists, not the context.

    Args:
        q: queries, [T, Hi, D] floating point or float8_e4m3fn, or [T, Hi, D/2] packed e2m1 with
            q_scales.
        index_cache: index keys, [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        weights: weights of the heads, [T, Hi] float32 (or float64).
        lengths: one past each token's last visible entry, [T] int32; clamped to what the block
            table and max_context cover.
        block_table: page ids of each request in order, [R, pages] int32.
        k: number of entries to select, at least 1.
        max_context: most entries that a row sees; None for all that the table covers. Work and
            memory follow it, so that nothing has to be read back from a device.
        token_to_req: block-table row of each token, [T] int32; a token whose row is outside [0, R)
            selects nothing. None if each request has T / R tokens, one request after the other.
            Tokens of a request should be neighbours, which then share the keys that are read.
        layout: identifier of the cache's layout, whose rows have D channels.
        q_scales: ue8m0 scale bytes of a packed q, [T, Hi, D/32] uint8.
        scratch_bytes: most bytes to allocate besides results, at least 16 MiB.
        out: entries to write into, [T, k] int32; None to allocate them.
        slot_table: block table of the cache whose rows the index keys stand for, [R, pages'] int32;
            required with ``slots``.
        slot_page_size: number of entries in a page of ``slot_table``.
        slots: slots of the chosen entries in ``slot_table`` to write, [T, k] int32; -1 after the
            last and where a page does not exist. None to skip them.
        counts: numbers of chosen entries to write, [T] int32; None to skip them.
        blocks: numbers of blocks to select within, [T, B] int32, distinct and ascending, then -1,
            as ``select_candidate_blocks`` returns them; blocks after the last entry are ignored.
            None to see all entries.
        block_size: number of entries in a block, a divisor of the entries of a page.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Chosen entries, ascending, then -1: [T, k] int32, ``out`` if given.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong, a packed q has no
            q_scales, k is below 1, scratch_bytes does not suffice for a token's scores, slots come
            without slot_table, or blocks do not divide a page.

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
    """Require queries [.., H, _] of ``width`` channels, and scale bytes of packed ones.

    Raises:
        TypeError, ValueError: if width, scale bytes or their shape is wrong.
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
