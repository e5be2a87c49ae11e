"""DeepGEMM's index scores over anymla's operations: ``from anymla.compat import deep_gemm``.

For engines that keep their own top-k. The functions take what DeepGEMM's take and return what they
return, on every device that anymla runs on; numbers of heads, page sizes and next_n are free. Where
DeepGEMM leaves scores of invisible entries undefined, they are -inf here, so ``clean_logits``
changes nothing. Schedules are not needed: any ``schedule_meta`` will do, None included.

``anymla.ops.indexer.select_topk`` does scores and selection in bounded memory instead.

Source of the contract: DeepGEMM's public interface and tests (github.com/deepseek-ai/DeepGEMM).
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.ops.indexer import mqa_logits, paged_mqa_logits
from anymla.ops.registry import INT32, check, require

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
]

# Scores of one call stay below this many elements (256 MiB) where rows are moved to their start.
_MOVED_ELEMENTS = 1 << 26
_LOGITS_DTYPES = (torch.float32, torch.bfloat16)


def get_num_sms() -> int:
    """Multiprocessors of the current device; 1 without a GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().multi_processor_count)
    return 1


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """The schedule argument of the paged functions, which ignore it.

    Args:
        context_lens: [B] or [B, next_n] int32.
        block_kv: entries of a page.
        num_sms: SMs to plan for.
        indices: [B] int32, which rows belong together.

    Returns:
        [num_sms + 1, 2] int32 zeros.
    """
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores against one dense list of FP8 keys; see ``fp8_fp4_mqa_logits``.

    Args:
        q: [M, H, D] float8_e4m3fn.
        kv: [N, D] float8_e4m3fn and their scales, [N] float32.
        weights: [M, H] float32.
        cu_seq_len_k_start: [M] int32, first visible key of each row.
        cu_seq_len_k_end: [M] int32, one past the last.
        clean_logits: invisible scores shall be -inf; they always are.
        max_seqlen_k: if above 0, columns of the result, which then start at each row's first key.

    Returns:
        [M, N] or [M, max_seqlen_k] float32.
    """
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """``sum_h weights[m, h] * relu(q[m, h] . k[n])`` for visible keys, else -inf.

    Args:
        q: [M, H, D] float8_e4m3fn and None; or [M, H, D/2] packed e2m1 (int8 or uint8, even channel
            in the low half) and [M, H] int32, four scale bytes each, block 0 lowest.
        kv: [N, D] float8_e4m3fn and [N] float32; or [N, D/2] packed and [N] int32, as q.
        weights: [M, H] float32.
        cu_seq_len_k_start: [M] int32, first visible key of each row.
        cu_seq_len_k_end: [M] int32, one past the last.
        clean_logits: invisible scores shall be -inf; they always are.
        max_seqlen_k: if above 0, columns of the result, which then start at each row's first key;
            not with ``clean_logits``, as in DeepGEMM.
        logits_dtype: float32 or bfloat16, rounded at the end.
        schedule_meta: ignored.

    Returns:
        [M, N] or [M, max_seqlen_k] of ``logits_dtype``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or max_seqlen_k with clean_logits.
    """
    name = "fp8_fp4_mqa_logits"
    _check_dtype(name, logits_dtype)
    require(not (max_seqlen_k and clean_logits), name, "clean_logits", "False here", clean_logits)
    codes, q_scales = _queries(name, q)
    keys, scale = kv
    if _is_packed(keys):
        # Exact in bfloat16, as products of an e2m1 code and a power of two.
        keys = dequantize_mxfp4(keys.view(torch.uint8), _scale_bytes(name, scale), torch.bfloat16)
        key_scale = None
    else:
        key_scale = scale
    starts, ends = cu_seq_len_k_start, cu_seq_len_k_end
    if not max_seqlen_k:
        logits = mqa_logits(codes, keys, key_scale, weights, starts, ends, q_scales=q_scales)
        return logits.to(logits_dtype)

    rows, count = len(codes), len(keys)
    moved = torch.full((rows, max_seqlen_k), -torch.inf, dtype=logits_dtype, device=codes.device)
    column = torch.arange(max_seqlen_k, device=codes.device)
    step = max(1, _MOVED_ELEMENTS // max(count, 1))
    for first in range(0, rows if count else 0, step):
        part = slice(first, first + step)
        logits = mqa_logits(
            codes[part],
            keys,
            key_scale,
            weights[part],
            starts[part],
            ends[part],
            q_scales=None if q_scales is None else q_scales[part],
        )
        source = starts[part].long().unsqueeze(1) + column
        scores = logits.gather(1, source.clamp(0, count - 1))
        outside = (source < 0) | (source >= count)
        moved[part] = scores.masked_fill_(outside, -torch.inf).to(logits_dtype)
    return moved


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores against FP8 pages; see ``fp8_fp4_paged_mqa_logits``, q being its first half."""
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        torch.float32,
        indices,
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """``sum_h weights[m, h] * relu(q[m, h] . key)`` over every request's pages.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn and None; or [B, next_n, H, D/2] packed e2m1 and
            [B, next_n, H] int32, as in ``fp8_fp4_mqa_logits``.
        kv_cache: [P, block, 1, D + 4] uint8, a page's codes and then its float32 scales; or
            [P, block, 1, D/2 + 4], packed codes and then four scale bytes an entry. Any page
            stride. D is 128.
        weights: [B * next_n, H] float32.
        context_lens: [B, next_n] int32, entries visible to each row; or [B], entries visible to
            the last row of each request, the rows before it seeing one less each.
        block_table: [B, pages] int32.
        schedule_meta: ignored.
        max_context_len: columns of the result.
        clean_logits: invisible scores shall be -inf; they always are.
        logits_dtype: float32 or bfloat16, rounded at the end.
        indices: ignored; it tells which rows share pages, which changes no result.

    Returns:
        [B * next_n, max_context_len] of ``logits_dtype``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    name = "fp8_fp4_paged_mqa_logits"
    _check_dtype(name, logits_dtype)
    codes, q_scales = _queries(name, q)
    require(codes.ndim == 4, name, "q", "[B, next_n, H, D]", list(codes.shape))
    next_n = codes.shape[1]
    if context_lens.ndim == 1:
        check(name, context_lens=(context_lens, "B", INT32))
        before = torch.arange(next_n - 1, -1, -1, dtype=torch.int32, device=codes.device)
        context_lens = (context_lens.unsqueeze(1) - before).clamp(min=0)
    logits = paged_mqa_logits(
        codes,
        kv_cache,
        weights,
        context_lens,
        block_table,
        max_context=max_context_len,
        layout=INDEX_MXFP4 if _is_packed(codes) else INDEX_FP8,
        q_scales=q_scales,
    )
    return logits.to(logits_dtype)


def _is_packed(x: Tensor) -> bool:
    return x.dtype in (torch.int8, torch.uint8)


def _queries(name: str, q: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    codes, scales = q
    if not _is_packed(codes):
        require(scales is None, name, "q", "without scales where it is FP8", "scales")
        return codes, None
    require(scales is not None, name, "q", "with scales where it is packed", None)
    assert scales is not None
    return codes.view(torch.uint8), _scale_bytes(name, scales)


def _scale_bytes(name: str, scales: Tensor) -> Tensor:
    """Four scale bytes [.., 4] of each int32."""
    if scales.dtype != torch.int32:
        raise TypeError(f"{name}: scales of packed values must be int32, got {scales.dtype}")
    return scales.contiguous().unsqueeze(-1).view(torch.uint8)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in _LOGITS_DTYPES:
        raise TypeError(f"{name}: logits_dtype must be float32 or bfloat16, got {dtype}")
