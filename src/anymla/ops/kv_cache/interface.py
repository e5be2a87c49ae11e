"""Contracts of the operations that store rows in paged caches and read them back."""

from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._pages import check_cache
from anymla.ops.kv_cache.config import row_support
from anymla.ops.registry import FLOATS, INT32, INT64, check, operation, require


@operation(mutates=("k_cache",))
def quantize_and_insert_k_cache(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = MAIN_FP8,
    backend: str | None = None,
) -> None:
    """Encode rows in the cache's layout and store each at its slot.

    ``cache[slot_mapping[n]] = encode(k[n])`` for n < N. In ``v4_main_fp8`` a row is rounded to
    bfloat16; each block of 64 of the first 448 channels becomes e4m3 codes of ``x * 2^-e`` with
    ``e = ceil(log2(max(amax, 1e-4) / 448))`` stored as byte e + 127; the last 64 channels are
    stored as bfloat16. ``formats.page_layout`` describes the other layouts.

    Args:
        k: rows that are already normed and rotated, [N or more, D] floating point; rows past N are
            ignored.
        k_cache: cache to write, [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
            Only the entries at the given slots change; padding bytes stay as they are.
        slot_mapping: slots ``page * B + offset`` of the rows, [N] int64. Slots outside the cache
            (negative, or past its end) are skipped; valid slots are distinct.
        layout: identifier of the cache's layout, whose rows have D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong.

    Source: DeepSeek-V4 reference, inference/kernel.py (act_quant), and FlashMLA's cache format.
    """
    name = "quantize_and_insert_k_cache"
    dims = check(name, slot_mapping=(slot_mapping, "N", INT64), k=(k, "N+ D", FLOATS))
    check_cache(name, "k_cache", k_cache, layout, channels=dims["D"], device=k.device)


@operation(mutates=("out",))
def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    offset: int = 0,
    layout: str = MAIN_FP8,
    backend: str | None = None,
) -> None:
    """Decode the last rows of each request's sequence into a dense buffer.

    With n = gather_lens[r] (or seq_lens[r]), for i < n and p = seq_lens[r] - n + i:
    ``out[r, offset + i] = decode(cache[block_table[r, p // B] * B + p % B])``. For a compressed
    cache pass lengths in entries.

    Args:
        out: buffer to write, [R, M, D] floating point. Rows outside offset .. offset + n - 1 are
            not written; decoded rows past M are dropped.
        k_cache: cache to read, [Pages, B, row] (or [Pages, B, 1, row]) in ``layout``, any page
            stride.
        seq_lens: number of rows in each sequence, [R] int32.
        gather_lens: number n of each sequence's last rows to gather, [R] int32, or None for all; n
            <= 0 writes nothing.
        block_table: page ids of each request, [R, P] int32. A position without a page (before 0,
            past the table, or with a page id outside the cache) gives a zero row.
        offset: first row of ``out`` that is written, at least 0.
        layout: identifier of the cache's layout, whose rows have D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong, or offset is negative.

    Source: vLLM's DeepSeek-V4 prefill gathers its cache this way; decoding as in ``formats``.
    """
    name = "dequantize_and_gather_k_cache"
    dims = check(
        name,
        out=(out, "R M D", FLOATS),
        seq_lens=(seq_lens, "R", INT32),
        gather_lens=(gather_lens, "R", INT32),
        block_table=(block_table, "R P", INT32),
    )
    require(offset >= 0, name, "offset", "at least 0", offset)
    check_cache(name, "k_cache", k_cache, layout, channels=dims["D"], device=out.device)


@operation(mutates=("out",))
def dequant_gather_slots(
    out: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    *,
    layout: str = MAIN_FP8,
    backend: str | None = None,
) -> None:
    """Decode the rows at the given slots: ``out[m] = decode(cache[indices[m]])``.

    Args:
        out: buffer for the decoded rows, [M, D] floating point; written.
        k_cache: cache to read, [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        indices: slots ``page * B + offset`` to read, [M] int32. A slot outside the cache (negative,
            or past its end) gives a zero row.
        layout: identifier of the cache's layout, whose rows have D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong.

    Source: vLLM's XPU decode path gathers its cache this way; decoding as in ``formats``.
    """
    name = "dequant_gather_slots"
    dims = check(name, out=(out, "M D", FLOATS), indices=(indices, "M", INT32))
    check_cache(name, "k_cache", k_cache, layout, channels=dims["D"], device=out.device)


_FAMILY = "anymla.ops.kv_cache"
quantize_and_insert_k_cache.register_lazy("reference", "anymla.ops._reference")
dequantize_and_gather_k_cache.register_lazy("reference", f"{_FAMILY}.reference")
dequant_gather_slots.register_lazy("reference", f"{_FAMILY}.reference")
for _operation, _kernel in (
    (quantize_and_insert_k_cache, "insert"),
    (dequantize_and_gather_k_cache, "gather"),
    (dequant_gather_slots, "gather"),
):
    _operation.register_lazy("torch", f"{_FAMILY}.torch_rows")
    _operation.register_lazy("triton", f"{_FAMILY}.triton_{_kernel}", supports=row_support)
