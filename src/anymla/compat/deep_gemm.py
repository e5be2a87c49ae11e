"""DeepGEMM's index scores over anymla's operations: ``from anymla.compat import deep_gemm``.

These functions are for engines that keep their own top-k. They have DeepGEMM's parameters and
results, on every device that anymla supports; numbers of heads, page sizes and next_n are free.
Where DeepGEMM leaves scores of invisible entries undefined, they are -inf here. Schedules are not
needed: any ``schedule_meta`` is accepted, None included. DeepGEMM's other functions, its matrix
products and their fusions, are not provided: they raise NotImplementedError.

Two signatures are known, and distinguished by type: those of DeepGEMM 2.8 and sgl-deep-gemm 0.2.5
(``signatures.json``), where logits have the dtype of the weights and a row's first column is its
first key; and those of DeepGEMM 2.5, with ``clean_logits`` and ``logits_dtype``.

``anymla.ops.indexer.select_topk`` computes scores and selection together in bounded memory.

Source of the contract: DeepGEMM's public interface and tests (github.com/deepseek-ai/DeepGEMM).
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from anymla.compat._index_keys import Operand, decoded_pages, key_list, queries
from anymla.compat._sparse_scores import (
    fp8_fp4_paged_sparse_mqa_logits,
    fp8_fp4_sparse_mqa_logits,
    get_paged_sparse_mqa_logits_metadata,
    get_sparse_mqa_logits_metadata,
)
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_BF16_128
from anymla.ops.indexer import mqa_logits, paged_mqa_logits
from anymla.ops.registry import INT32, check, require

__all__ = [
    "__version__",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mqa_logits_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "set_num_sms",
]

# Version of the interface, with a suffix that names this implementation.
__version__ = "0.2.5+anymla"

# Upper bound of one call's scores, in elements (256 MiB), if rows are moved to their start.
_MOVED_ELEMENTS = 1 << 26
# Upper bound of MXFP8 pages that are decoded at a time, in bytes.
_DECODED_BYTES = 1 << 28
_LOGITS_DTYPES = (torch.float32, torch.bfloat16)

P = ParamSpec("P")
R = TypeVar("R")
_num_sms: int | None = None


def _known_by(place: int, *older: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept calls of an older signature, recognised by a bool at a position.

    Args:
        place: position of that bool.
        older: names of the older signature's parameters from there on.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if len(args) > place and isinstance(args[place], bool):
                if len(args) - place > len(older):
                    most = place + len(older)
                    raise TypeError(
                        f"{function.__name__}: takes {most} arguments with clean_logits, got "
                        f"{len(args)}"
                    )
                named = dict(zip(older, args[place:], strict=False))
                return function(*args[:place], **named, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorate


def get_num_sms() -> int:
    """Return the number of SMs to plan for: as set, or the device's; 1 without a GPU."""
    if _num_sms is not None:
        return _num_sms
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().multi_processor_count)
    return 1


def set_num_sms(num_sms: int) -> None:
    """Set the result of ``get_num_sms`` and nothing else: anymla's kernels use the whole device.

    Raises:
        ValueError: ``num_sms`` is below 1.
    """
    global _num_sms
    require(num_sms >= 1, "set_num_sms", "num_sms", ">= 1", num_sms)
    _num_sms = num_sms


def get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor, num_kv_tokens: int, num_heads: int
) -> Tensor:
    """Return the schedule argument of ``fp8_fp4_mqa_logits``, which ignores it.

    Args:
        cu_seq_len_k_start: int32 [M], first visible key of each row.
        cu_seq_len_k_end: int32 [M], one past the last visible key.
        num_kv_tokens: number of keys in the list.
        num_heads: number of heads of the queries.

    Returns:
        A tensor of one zero, int32 [1].
    """
    return torch.zeros(1, dtype=torch.int32, device=cu_seq_len_k_start.device)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Return the schedule argument of the paged functions, which ignore it.

    Args:
        context_lens: int32 [B] or [B, next_n], visible entries.
        block_kv: number of entries per page.
        num_sms: number of SMs to plan for.
        indices: int32 [B], rows that belong together.

    Returns:
        A tensor of zeros, int32 [num_sms + 1, 2].
    """
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_mqa_logits(
    q: Tensor,
    kv: Operand,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Compute scores against one dense list of FP8 keys, in DeepGEMM 2.5's signature.

    Args:
        q: queries of all heads, float8_e4m3fn [M, H, D].
        kv: keys [N, D] in float8_e4m3fn, and their scales [N] in float32.
        weights: head weights [M, H] in float32.
        cu_seq_len_k_start: int32 [M], first visible key of each row.
        cu_seq_len_k_end: int32 [M], one past the last visible key.
        clean_logits: True to request -inf for invisible scores, which they always are. A number
            that is no bool is taken as ``max_seqlen_k``, as in ``fp8_fp4_mqa_logits``.
        max_seqlen_k: if above 0, number of columns of the result, which then starts at each row's
            first key; not with ``clean_logits``, as in DeepGEMM.

    Returns:
        Scores [M, N] or [M, max_seqlen_k] in float32.
    """
    if not isinstance(clean_logits, bool):
        clean_logits, max_seqlen_k = False, clean_logits
    return fp8_fp4_mqa_logits(
        q,
        kv,
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        max_seqlen_k,
        clean_logits=clean_logits,
        logits_dtype=torch.float32,
    )


@_known_by(5, "clean_logits", "max_seqlen_k", "logits_dtype", "schedule_meta")
def fp8_fp4_mqa_logits(
    q: Operand,
    kv: Operand,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    max_seqlen_k: int = 0,
    schedule_meta: Tensor | None = None,
    *,
    clean_logits: bool = False,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``sum_h weights[m, h] * relu(q[m, h] . k[n])`` for visible keys, else -inf.

    Args:
        q: [M, H, D] float8_e4m3fn, alone or with None; or with [M, H] int32, four scale bytes
            each, block 0 lowest (MXFP8); or [M, H, D/2] packed e2m1 (int8 or uint8, even channel
            in the low half) with such scales (MXFP4).
        kv: keys [N, D] float8_e4m3fn and [N] float32; or as q with [N] int32. Keys alone have scale
            1.
        weights: head weights [M, H], float32 or bfloat16.
        cu_seq_len_k_start: int32 [M], first visible key of each row.
        cu_seq_len_k_end: int32 [M], one past the last visible key.
        max_seqlen_k: if above 0, number of columns of the result, which then starts at each row's
            first key. 0 (which current DeepGEMM refuses) for all N keys.
        schedule_meta: ignored, because no schedule is needed.
        clean_logits: True to request -inf for invisible scores, which they always are. Not with
            ``max_seqlen_k``, as in DeepGEMM 2.5.
        logits_dtype: dtype of the result, float32 or bfloat16; None for that of the weights.

    Returns:
        Scores [M, N] or [M, max_seqlen_k] in ``logits_dtype``.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device, or max_seqlen_k is
            given with clean_logits.
    """
    name = "fp8_fp4_mqa_logits"
    dtype = _logits_dtype(name, logits_dtype, weights)
    require(not (max_seqlen_k and clean_logits), name, "clean_logits", "False here", clean_logits)
    require(max_seqlen_k >= 0, name, "max_seqlen_k", ">= 0", max_seqlen_k)
    codes, q_scales, _ = queries(name, q)
    keys, key_scale = key_list(name, kv)
    weights = _wide(weights)
    starts, ends = cu_seq_len_k_start, cu_seq_len_k_end
    if not max_seqlen_k:
        logits = mqa_logits(codes, keys, key_scale, weights, starts, ends, q_scales=q_scales)
        return logits.to(dtype)

    rows, count = len(codes), len(keys)
    moved = torch.full((rows, max_seqlen_k), -torch.inf, dtype=dtype, device=codes.device)
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
        moved[part] = scores.masked_fill_(outside, -torch.inf).to(dtype)
    return moved


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Compute scores against FP8 pages in float32, in DeepGEMM 2.5's signature.

    The arguments are those of ``fp8_fp4_paged_mqa_logits``. A tensor for ``clean_logits`` is taken
    as ``indices``.
    """
    return fp8_fp4_paged_mqa_logits(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        indices=indices,
        logits_dtype=torch.float32,
    )


@_known_by(7, "clean_logits", "logits_dtype", "indices")
def fp8_fp4_paged_mqa_logits(
    q: Operand,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    indices: Tensor | None = None,
    *,
    clean_logits: bool = False,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``sum_h weights[m, h] * relu(q[m, h] . key)`` over every request's pages.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn, alone or with None; or with [B, next_n, H] int32 scales
            (MXFP8); or [B, next_n, H, D/2] packed e2m1 with such scales, as in
            ``fp8_fp4_mqa_logits``.
        kv_cache: [P, block, 1, D + 4] uint8, a page's codes and then its scales, float32 or (with
            scales of q) int32; or [P, block, 1, D/2 + 4], packed codes and then four scale bytes
            an entry. Any page stride. D is 128.
        weights: head weights [B * next_n, H], float32 or bfloat16.
        context_lens: int32 [B, next_n], number of entries visible to each row; or [B], number of
            entries visible to the last row of each request, one less for each row before it.
        block_table: int32 [B, pages], page numbers of each request.
        schedule_meta: ignored, because no schedule is needed.
        max_context_len: number of columns of the result.
        indices: ignored; it names rows that share pages, which changes no result.
        clean_logits: True to request -inf for invisible scores, which they always are.
        logits_dtype: dtype of the result, float32 or bfloat16; None for that of the weights.

    Returns:
        Scores [B * next_n, max_context_len] in ``logits_dtype``.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, shape or device.
    """
    name = "fp8_fp4_paged_mqa_logits"
    dtype = _logits_dtype(name, logits_dtype, weights)
    codes, q_scales, form = queries(name, q)
    require(codes.ndim == 4, name, "q", "[B, next_n, H, D]", list(codes.shape))
    next_n = codes.shape[1]
    if context_lens.ndim == 1:
        check(name, context_lens=(context_lens, "B", INT32))
        before = torch.arange(next_n - 1, -1, -1, dtype=torch.int32, device=codes.device)
        context_lens = (context_lens.unsqueeze(1) - before).clamp(min=0)
    if form == "mxfp8":
        return _mxfp8_paged_logits(
            name, codes, kv_cache, _wide(weights), context_lens, block_table, max_context_len
        ).to(dtype)
    scores = paged_mqa_logits(
        codes,
        kv_cache,
        _wide(weights),
        context_lens,
        block_table,
        max_context=max_context_len,
        layout=INDEX_MXFP4 if form == "mxfp4" else INDEX_FP8,
        q_scales=q_scales,
    )
    return scores.to(dtype)


def _mxfp8_paged_logits(
    name: str,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context: int,
) -> Tensor:
    """Run ``paged_mqa_logits`` over MXFP8 pages, which are decoded for some requests at a time."""
    requests, rows = q.shape[:2]
    check(
        name,
        dims={"R": requests, "R*J": requests * rows},
        weights=(weights, "R*J _", torch.float32),
        context_lens=(context_lens, "R _", INT32),
        block_table=(block_table, "R _", INT32),
    )
    block_table = block_table[:, : -(-max_context // kv_cache.shape[1])]
    step = max(1, _DECODED_BYTES // max(1, 256 * kv_cache.shape[1] * block_table.shape[1]))
    logits = weights.new_empty(requests * rows, max_context)
    for first in range(0, requests, step):
        cache, table = decoded_pages(name, kv_cache, block_table[first : first + step])
        part = slice(first * rows, (first + step) * rows)
        paged_mqa_logits(
            q[first : first + step],
            cache,
            weights[part],
            context_lens[first : first + step],
            table,
            max_context=max_context,
            layout=ROWS_BF16_128,
            out=logits[part],
        )
    return logits


def _wide(weights: Tensor) -> Tensor:
    return weights.float() if weights.dtype == torch.bfloat16 else weights


def _logits_dtype(name: str, given: torch.dtype | None, weights: Tensor) -> torch.dtype:
    """Return the result's dtype: as given, or bfloat16 for bfloat16 weights, else float32."""
    if given is None:
        return torch.bfloat16 if weights.dtype == torch.bfloat16 else torch.float32
    if given not in _LOGITS_DTYPES:
        raise TypeError(f"{name}: logits_dtype must be float32 or bfloat16, got {given}")
    return given


@functools.cache
def _names() -> frozenset[str]:
    """Return the names of DeepGEMM's public functions."""
    recorded = importlib.resources.files("anymla.compat").joinpath("signatures.json")
    return frozenset(
        json.loads(recorded.read_text(encoding="utf-8"))["deep_gemm"]["modules"]["deep_gemm"]
    )


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises, because DeepGEMM's function is not provided."""
    if name not in _names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def not_provided(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"anymla.compat.deep_gemm: {name} is not provided, only DeepGEMM's index scores are; "
            "anymla.ops.linear, anymla.ops.moe and anymla.ops.hyper_connection have anymla's own "
            "matrix products, experts and hyper-connections, or use DeepGEMM itself"
        )

    not_provided.__name__ = not_provided.__qualname__ = name
    return not_provided
