"""Contracts for storing rows in paged caches and reading them back."""

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
        k: [N or more, D] floating point, normed and rotated; rows past N are ignored.
        k_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride; written. Nothing
            but the entries named by slots changes, padding included.
        slot_mapping: [N] int64, ``page * B + offset``. Slots outside the cache (negative, or past
            its end) are skipped; valid slots are distinct.
        layout: layout id of the cache, of D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout.

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
        out: [R, M, D] floating point; written. Rows outside offset .. offset + n - 1 are untouched;
            rows past M are dropped.
        k_cache: [Pages, B, row] (or [Pages, B, 1, row]) in ``layout``, any page stride.
        seq_lens: [R] int32, rows in each sequence.
        gather_lens: [R] int32, how many of its last rows to gather, or None for all. n <= 0 writes
            nothing.
        block_table: [R, P] int32. A position that has no page (before 0, past the table, or a page
            id outside the cache) gives a zero row.
        offset: first row of ``out`` that is written, >= 0.
        layout: layout id of the cache, of D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout, or a negative offset.

    Source: vLLM's DeepSeek-V4 prefill gathers its cache this way; decode as in ``formats``.
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
        out: [M, D] floating point; written.
        k_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        indices: [M] int32, ``page * B + offset``. A slot outside the cache (negative, or past its
            end) gives a zero row.
        layout: layout id of the cache, of D channels.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout.

    Source: vLLM's XPU decode path gathers its cache this way; decode as in ``formats``.
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
