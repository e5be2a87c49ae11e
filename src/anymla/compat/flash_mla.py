"""FlashMLA's Python interface over anymla's operations: ``from anymla.compat import flash_mla``.

The functions have FlashMLA's parameters and results, on every device that anymla supports;
docs/compat.md lists the differences. Numbers of heads, top-k widths, page sizes and page strides
are free. The dense functions are not provided.

Source of the contract: the public interface, documentation and tests of FlashMLA
(github.com/deepseek-ai/FlashMLA) and of its fork sgl-flash-mla 1.0.0, which has the kernels of
FlashMLA's release of 30 September 2026 and those that this release dropped, and the ``out``
argument of the build that vLLM ships. ``signatures.json`` has the fork's signatures.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymla.compat import fused_norm_rope_attn_rope_cast
from anymla.compat._caches import cache_of
from anymla.compat._dense import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    not_provided,
)
from anymla.compat._scheduling import (
    FlashMLASchedMeta,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_rows
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, require

__all__ = [
    "FlashMLASchedMeta",
    "__version__",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

# Version of the interface, with a suffix that names this implementation.
__version__ = "1.0.0+anymla"

_LOG2_E = 1 / math.log(2)


def has_legacy() -> bool:
    """Return True: ``use_legacy`` is supported, with all its cache formats but V32_NO_ROPE."""
    return True


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool | Tensor | None = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run sparse decode over one or two paged FP8 caches, in one softmax with an optional sink.

    Args:
        q: [b, s_q, H, d] floating point; d is 512 for V4's caches, 576 for V3.2's. Any H.
        k_cache: [P, B, 1, 584] (DeepSeek-V4), [P, B, 1, 656] (DeepSeek-V3.2), [P, B, 1, 528] (FP8
            rows of DeepSeek-V4.1) or [P, B, 1, 288] (its NVFP4 rows, which FlashMLA takes as
            ``extra_k_cache`` alone), any type of one byte, any page size and page stride.
        block_table: ignored; slots in ``indices`` are global.
        cache_seqlens: ignored, because ``topk_length`` holds the lengths.
        head_dim_v: width of the value, the first channels of a row. FlashMLA supports 512 only.
        tile_scheduler_metadata: result of ``get_mla_metadata``.
        num_splits: None, for compatibility.
        softmax_scale: factor of the scores; None for d ** -0.5.
        causal: must be False.
        is_fp8_kvcache: True; None means the same if ``indices`` is given.
        indices: int32 [b, s_q, topk] slots, ``page * B + offset``; a slot that is negative or
            beyond the cache is skipped (FlashMLA reads out of bounds for all but -1).
        attn_sink: float32 [H], a logit per head that carries no value; infinities are legal.
        extra_k_cache: second cache, with its own page size, stride and record.
        extra_indices_in_kvcache: int32 [b, s_q, extra topk] slots of ``extra_k_cache``.
        topk_length: int32 [b], leading columns of ``indices`` in use, for each of the s_q queries.
        extra_topk_length: int32 [b], the same for ``extra_indices_in_kvcache``.
        enable_batch_invariant: True for bitwise equal results in any batch. A tensor is taken as
            ``out``, which had this position in older builds.
        use_legacy: True for the pages of FlashMLA's kernels before September 2026: a page of V4.1
            then holds the values of all entries before their scales. V4's and V3.2's pages are the
            same.
        kv_format: format of ``k_cache``: "V4", "V32", "V41" or "V41_FP4"; None to infer it from the
            width of the entries. "V32_NO_ROPE" is not provided.
        descale_q: must be None: a scale of dense FP8 decode, which is not provided.
        descale_k: must be None, as ``descale_q``.
        out: [b, s_q, H, head_dim_v] of q's dtype, written; None to allocate it.

    Returns:
        Output [b, s_q, H, head_dim_v] of q's dtype (0 for a row without keys) and the natural-log
        lse [b, H, s_q] float32, the sink excluded, +inf for a row without keys.

    Raises:
        NotImplementedError: ``indices`` is missing (dense attention), or the format is not
            provided.
        TypeError, ValueError: the arguments contradict each other.
    """
    name = "flash_mla_with_kvcache"
    if isinstance(enable_batch_invariant, Tensor):
        out, enable_batch_invariant = _moved_out(name, enable_batch_invariant, out), False
    if indices is None:
        not_provided(name, "without indices (dense decode)")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise TypeError(
            f"{name}: tile_scheduler_metadata must be what get_mla_metadata returns, got "
            f"{type(tile_scheduler_metadata).__name__}"
        )
    require(num_splits is None, name, "num_splits", "None", num_splits)
    require(not causal, name, "causal", "False with indices", causal)
    fp8 = is_fp8_kvcache is None or bool(is_fp8_kvcache)
    require(fp8, name, "is_fp8_kvcache", "True or None with indices", is_fp8_kvcache)
    for argument, descale in (("descale_q", descale_q), ("descale_k", descale_k)):
        require(descale is None, name, argument, "None with indices", "a tensor")
    # operations, too, skip their checks while they are traced
    if not torch.compiler.is_compiling():
        dims = check(
            name,
            q=(q, "b s H D", FLOATS),
            indices=(indices, "b s _", INT32),
            attn_sink=(attn_sink, "H", FLOAT32_UP),
            extra_indices_in_kvcache=(extra_indices_in_kvcache, "b s _", INT32),
            topk_length=(topk_length, "b", INT32),
            extra_topk_length=(extra_topk_length, "b", INT32),
        )
        check(
            name,
            dims=dims | {"V": head_dim_v},
            q=(q, "b s H D", FLOATS),
            out=(out, "b s H V", q.dtype),
        )
    batch, queries = q.shape[:2]
    cache, layout = cache_of(name, "k_cache", k_cache, use_legacy, kv_format)
    extra_indices = extra_indices_in_kvcache
    both = (extra_k_cache is None) == (extra_indices is None)
    expected = "given together with extra_k_cache"
    require(both, name, "extra_indices_in_kvcache", expected, "one of them")
    flat = None if out is None else _as_rows(out)
    lengths, extra_lengths = _each(topk_length, queries), _each(extra_topk_length, queries)
    rows = [CacheRows(cache, layout, indices.flatten(0, 1), lengths)]
    if extra_k_cache is not None and extra_indices is not None:
        extra_cache, layout = cache_of(name, "extra_k_cache", extra_k_cache, use_legacy)
        rows.append(CacheRows(extra_cache, layout, extra_indices.flatten(0, 1), extra_lengths))
    else:
        got, expected = "a tensor", "None without extra_k_cache"
        require(extra_lengths is None, name, "extra_topk_length", expected, got)
    plan = None
    if not enable_batch_invariant:
        plan = tile_scheduler_metadata.plan(
            lengths,
            extra_lengths,
            q.shape[2],
            indices.shape[2],
            None if extra_indices is None else extra_indices.shape[2],
        )
    result, lse = sparse_attention(
        q.flatten(0, 1),
        rows,
        sink=attn_sink,
        scale=softmax_scale,
        value_dim=head_dim_v,
        empty_lse=math.inf,
        batch_invariant=bool(enable_batch_invariant),
        plan=plan,
        out=flat,
    )
    result = result.unflatten(0, (batch, queries))
    if out is not None:
        result = out if flat is not None else out.copy_(result)
    return result, lse.unflatten(0, (batch, queries)).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool | Tensor | None = False,
    return_log2_lse: bool | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run sparse prefill over the rows of one tensor.

    Args:
        q: floating point [s_q, H, d]; d is 512 or 576 in FlashMLA. Any H is allowed.
        kv: floating point rows [s_kv, 1, d].
        indices: int32 [s_q, 1, topk], row numbers of kv; numbers outside [0, s_kv) are skipped.
        sm_scale: factor of the scores.
        d_v: width of the value, the first channels of a row. FlashMLA supports 512 only.
        attn_sink: float32 [H], a logit per head that carries no value; infinities are legal.
        topk_length: int32 [s_q], leading columns of ``indices`` in use. Rows of later columns are
            never read, whatever they hold.
        use_legacy: ignored. A tensor is taken as ``out``, which had this position in older builds.
        return_log2_lse: None for both statistics in natural-log units, True for base 2, False for
            None instead of both.
        out: [s_q, H, d_v] of q's dtype, written; None to allocate it.

    Returns:
        Output [s_q, H, d_v] of q's dtype; max_logits [s_q, H] float32, the largest scaled score;
        and lse [s_q, H] float32. Both exclude the sink, and both are multiplied by log2(e) if
        ``return_log2_lse`` is True. A row without keys gives output 0, max_logits -inf and lse
        +inf.

    Raises:
        TypeError, ValueError: the arguments contradict each other.
    """
    name = "flash_mla_sparse_fwd"
    if isinstance(use_legacy, Tensor):
        out = _moved_out(name, use_legacy, out)
    if not torch.compiler.is_compiling():
        check(
            name,
            q=(q, "s H D", FLOATS),
            kv=(kv, "_ 1 D", FLOATS),
            indices=(indices, "s 1 _", INT32),
            attn_sink=(attn_sink, "H", FLOAT32_UP),
            topk_length=(topk_length, "s", INT32),
        )
    max_logits = None
    if return_log2_lse is not False:
        wide = torch.promote_types(q.dtype, torch.float32)
        max_logits = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    result, lse = sparse_attention_rows(
        q,
        kv,
        indices,
        topk_length,
        sink=attn_sink,
        scale=sm_scale,
        value_dim=d_v,
        empty_lse=math.inf,
        out=out,
        max_logits=max_logits,
    )
    if max_logits is None:
        return result, None, None
    if return_log2_lse:
        return result, max_logits * _LOG2_E, lse * _LOG2_E
    return result, max_logits, lse


def _moved_out(name: str, given: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out`` if it is given at the position that it had in older builds."""
    require(out is None, name, "out", "given once", "two tensors")
    return given


def _each(lengths: Tensor | None, queries: int) -> Tensor | None:
    """Repeat the requests' lengths for each of their queries."""
    if lengths is None or queries == 1:
        return lengths
    return lengths.unsqueeze(1).expand(-1, queries).flatten()


def _as_rows(out: Tensor) -> Tensor | None:
    """View [b, s, H, V] as [b * s, H, V]; None if its strides do not allow that."""
    batch, queries = out.shape[:2]
    if batch > 1 and queries > 1 and out.stride(0) != queries * out.stride(1):
        return None
    return out.view(-1, *out.shape[2:]) if out.numel() else out.flatten(0, 1)
