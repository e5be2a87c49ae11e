"""FlashMLA's query norm, RoPE, sparse attention, inverse RoPE and cast to FP8, as one call.

FlashMLA has one kernel for it, on sm_100; here a call runs three operations on any device, between
copies into and out of FlashMLA's orders of channels: norm and rotation, attention, and inverse
rotation with quantisation. The formulas and roundings are

    q'[t, h] = rope(q[t, h] / sqrt(mean(q[t, h]^2) + eps))     in float32, rounded to q's dtype;
                                                               the factor is left out without norm
    o[t, h]  = sparse attention of q'[t, h]                    rounded to q's dtype
    z[t, h]  = inverse rope(o[t, h])                           in float32, not rounded
    e        = ceil(log2(max(amax, 1e-4) / 448))               of each 32 channels of z
    codes    = e4m3(z / 2^e), scales = 2^e                     nearest, ties to even

FlashMLA rounds the rotated query to bfloat16 before the norm's factor, which it multiplies into the
scores in float32, and does not round o. Everything else is the same.

Queries come in the order of FlashMLA's fused kernel, 16 channels of each head in turn: channel d of
head h at ``(d / 16 * H + h) * 16 + d % 16``. Codes of a group of g heads return with 32 channels of
each head in turn: channel d of the group's head h at ``(d / 32 * g + h) * 32 + d % 32``, and scales
with them. ``permute_q_b_proj`` and ``permute_wv_proj`` bring the weights around into these orders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymla.compat._caches import cache_of
from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_rows
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.norm_rope import qnorm_rope_kv_insert, rope
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, require

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_CHANNELS = 512
# Neighbouring channels of a head in the order of queries, and in that of codes.
_QUERY_CHUNK, _CODE_CHUNK = 16, 32
# Scale bytes of an int32, and the multiple of rows to which columns of scales are padded.
_BYTES, _ROW_STEP = 4, 4
_FP8 = torch.float8_e4m3fn


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm and rotate queries, attend to listed rows of one tensor, rotate back and cast to FP8.

    Args:
        enable_q_norm: True to norm each head without a weight, as DeepSeek-V4 does and V4.1 does
            not.
        rms_norm_eps: number added to the mean square of a head.
        token_positions: positions of the queries, [s_q] int32; clamped to the table.
        is_rope_neox_style: must be False: channels (2i, 2i + 1) are one pair.
        rope_dim: number of a head's last channels that rotate. FlashMLA supports 64 only.
        cos_sin_cache: rotary table [L, rope_dim] float32, cosines before sines.
        n_wv_group: number of groups of heads that the output projection has.
        num_per_channels: must be 32: the number of channels that share a scale.
        use_tma_aligned_col_major_sf: must be True: scales of neighbouring tokens are neighbours.
        round_sf: must be True: scales are powers of two.
        use_packed_ue8m0: must be True: scales are exponent bytes, four in an int32.
        q: queries [s_q, H, 512] floating point, in the order of ``permute_q_b_proj``, before norm
            and RoPE. Any H that is a multiple of n_wv_group.
        kv: floating point rows [s_kv, 1, 512], rotated.
        indices: row numbers of kv, [s_q, 1, topk] int32; numbers outside [0, s_kv) are skipped.
        sm_scale: factor of the scores.
        d_v: width of the value, which must be 512.
        attn_sink: float32 [H], a logit per head that carries no value; infinities are legal.
        topk_length: int32 [s_q], leading columns of ``indices`` in use; later ones are never read.
        use_legacy: ignored, since rows are not quantised.

    Returns:
        Codes float8_e4m3fn [s_q, n_wv_group, H / n_wv_group * 512] in the order of
        ``permute_wv_proj``; scales int32 [s_q, n_wv_group, H / n_wv_group * 4], of stride 1 along
        tokens; max_logits and lse [s_q, H] float32, natural logarithms without the sink. A query
        without keys gives codes 0, max_logits -inf and lse +inf.

    Raises:
        TypeError, ValueError: an argument has a value, dtype or shape that is not supported.
    """
    name = "fused_norm_rope_attn_rope_cast.prefill"
    _check_cast(
        name, is_rope_neox_style, num_per_channels, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        check(
            name,
            q=(q, "s H D", FLOATS),
            kv=(kv, "_ 1 D", FLOATS),
            indices=(indices, "s 1 _", INT32),
            attn_sink=(attn_sink, "H", FLOAT32_UP),
            topk_length=(topk_length, "s", INT32),
        )
        _check_heads(name, q, n_wv_group, token_positions, cos_sin_cache, rope_dim, d_v)
    positions = token_positions.long()
    heads = _query_heads(q, positions, cos_sin_cache, rms_norm_eps if enable_q_norm else None)
    wide = torch.promote_types(q.dtype, torch.float32)
    max_logits = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    out, lse = sparse_attention_rows(
        heads,
        kv,
        indices,
        topk_length,
        sink=attn_sink,
        scale=sm_scale,
        value_dim=d_v,
        empty_lse=math.inf,
        max_logits=max_logits,
    )
    return *_cast(out, positions, cos_sin_cache, n_wv_group), max_logits, lse


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    k_cache: Tensor,
    indices_in_kvcache: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries, attend to one or two paged caches, rotate back and cast to FP8.

    Args:
        enable_q_norm: True to norm each head; see ``prefill`` for all arguments up to ``q``.
        rms_norm_eps: number added to the mean square of a head.
        token_positions: positions of the queries, [s_q] int32.
        is_rope_neox_style: must be False.
        rope_dim: number of a head's last channels that rotate.
        cos_sin_cache: rotary table [L, rope_dim] float32, cosines before sines.
        n_wv_group: number of groups of heads that the output projection has.
        num_per_channels: must be 32: the number of channels that share a scale.
        use_tma_aligned_col_major_sf: must be True.
        round_sf: must be True.
        use_packed_ue8m0: must be True.
        q: queries [s_q, H, 512] floating point, in the order of ``permute_q_b_proj``; queries of
            all requests follow each other.
        k_cache: cache [P, B, 1, 584] (DeepSeek-V4), [P, B, 1, 528] or [P, B, 1, 288] (DeepSeek-V4.1
            in FP8 and NVFP4), any type of one byte, any page size and page stride.
        indices_in_kvcache: slots ``page * B + offset``, [s_q, topk] int32; a slot outside the cache
            is skipped.
        sm_scale: factor of the scores.
        d_v: width of the value, which must be 512.
        attn_sink: float32 [H], a logit per head that carries no value; infinities are legal.
        topk_length: int32 [s_q], leading columns of ``indices_in_kvcache`` in use.
        extra_k_cache: second cache, with its own page size, stride and format.
        extra_indices_in_kvcache: int32 [s_q, extra topk] slots of ``extra_k_cache``.
        extra_topk_length: int32 [s_q], leading columns of ``extra_indices_in_kvcache`` in use.
        use_legacy: True for V4.1's pages before September 2026, which hold the values of all
            entries before their scales. V4's pages are the same.

    Returns:
        Codes, scales and lse as of ``prefill``.

    Raises:
        TypeError, ValueError: an argument has a value, dtype or shape that is not supported.
    """
    name = "fused_norm_rope_attn_rope_cast.decode"
    _check_cast(
        name, is_rope_neox_style, num_per_channels, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0,
    )  # fmt: skip
    extra_indices = extra_indices_in_kvcache
    both = (extra_k_cache is None) == (extra_indices is None)
    expected = "given together with extra_k_cache"
    require(both, name, "extra_indices_in_kvcache", expected, "one of them")
    alone = extra_topk_length is None or extra_k_cache is not None
    require(alone, name, "extra_topk_length", "None without extra_k_cache", "a tensor")
    if not torch.compiler.is_compiling():
        check(
            name,
            q=(q, "s H D", FLOATS),
            indices_in_kvcache=(indices_in_kvcache, "s _", INT32),
            attn_sink=(attn_sink, "H", FLOAT32_UP),
            topk_length=(topk_length, "s", INT32),
            extra_indices_in_kvcache=(extra_indices, "s _", INT32),
            extra_topk_length=(extra_topk_length, "s", INT32),
        )
        _check_heads(name, q, n_wv_group, token_positions, cos_sin_cache, rope_dim, d_v)
    cache = cache_of(name, "k_cache", k_cache, use_legacy)
    rows = [CacheRows(*cache, indices_in_kvcache, topk_length)]
    if extra_k_cache is not None and extra_indices is not None:
        cache = cache_of(name, "extra_k_cache", extra_k_cache, use_legacy)
        rows.append(CacheRows(*cache, extra_indices, extra_topk_length))
    positions = token_positions.long()
    heads = _query_heads(q, positions, cos_sin_cache, rms_norm_eps if enable_q_norm else None)
    out, lse = sparse_attention(
        heads, rows, sink=attn_sink, scale=sm_scale, value_dim=d_v, empty_lse=math.inf
    )
    return *_cast(out, positions, cos_sin_cache, n_wv_group), lse


def permute_q_b_proj(
    weight_and_sf: tuple[Tensor, Tensor], h_q: int, d_q: int
) -> tuple[Tensor, Tensor]:
    """Bring the rows of the query projection into the order in which queries are taken.

    Args:
        weight_and_sf: weight float8_e4m3fn [h_q * d_q, K], and its scales int32 [h_q * d_q, n],
            four exponent bytes each.
        h_q: number of query heads.
        d_q: channels of a head, a multiple of 16.

    Returns:
        Weight and scales of the same shapes, with row ``(d / 16 * h_q + h) * 16 + d % 16`` for
        channel d of head h. The weight is contiguous; scales have stride 1 along rows, and columns
        padded to a multiple of four rows.

    Raises:
        TypeError, ValueError: a dtype or shape is wrong.
    """
    name = "fused_norm_rope_attn_rope_cast.permute_q_b_proj"
    weight, scales = weight_and_sf
    check(name, weight=(weight, "R K", _FP8), scales=(scales, "R _", INT32))
    whole = d_q > 0 and d_q % _QUERY_CHUNK == 0
    require(whole, name, "d_q", f"a multiple of {_QUERY_CHUNK}", d_q)
    expected = f"[{h_q} * {d_q}, K]"
    require(len(weight) == h_q * d_q, name, "weight", expected, list(weight.shape))
    codes = _interleaved(weight.view(torch.uint8), 0, h_q, _QUERY_CHUNK)
    return codes.contiguous().view(_FP8), _by_columns(_interleaved(scales, 0, h_q, _QUERY_CHUNK))


def permute_wv_proj(
    weight_and_sf: tuple[Tensor, Tensor], wv_group_size: int, d_o: int
) -> tuple[Tensor, Tensor]:
    """Bring the columns of the grouped output projection into the order in which codes return.

    Args:
        weight_and_sf: weight float8_e4m3fn [G, N, wv_group_size * d_o], and its scales int32
            [G, N, wv_group_size * d_o / 128], four exponent bytes each, of 32 columns a byte.
        wv_group_size: number of heads of a group.
        d_o: channels of a head, a multiple of 32.

    Returns:
        Weight and scales of the same shapes, with column ``(d / 32 * wv_group_size + h) * 32 +
        d % 32`` for channel d of a group's head h, and their scales likewise. The weight is
        contiguous; scales have stride 1 along rows, and columns padded to a multiple of four rows.

    Raises:
        TypeError, ValueError: a dtype or shape is wrong.
    """
    name = "fused_norm_rope_attn_rope_cast.permute_wv_proj"
    weight, scales = weight_and_sf
    dims = check(name, weight=(weight, "G N J", _FP8), scales=(scales, "G N S", INT32))
    whole = d_o > 0 and d_o % _CODE_CHUNK == 0
    require(whole, name, "d_o", f"a multiple of {_CODE_CHUNK}", d_o)
    width = wv_group_size * d_o
    require(dims["J"] == width, name, "weight", f"[G, N, {width}]", list(weight.shape))
    of_32 = dims["S"] * _BYTES * _CODE_CHUNK == width
    expected = f"[G, N, {width} / 128], of 32 columns a byte"
    require(of_32, name, "scales", expected, list(scales.shape))
    codes = _interleaved(weight.view(torch.uint8), 2, wv_group_size, _CODE_CHUNK)
    scale_bytes = _interleaved(scales.contiguous().view(torch.uint8), 2, wv_group_size, 1)
    words = scale_bytes.contiguous().view(torch.int32)
    return codes.contiguous().view(_FP8), _by_columns(words)


def _check_cast(
    name: str, neox: bool, channels: int, col_major: bool, rounded: bool, packed: bool
) -> None:
    """Refuse the options of FlashMLA's signature that have one legal value."""
    for argument, given, only in (
        ("is_rope_neox_style", neox, False),
        ("num_per_channels", channels, _CODE_CHUNK),
        ("use_tma_aligned_col_major_sf", col_major, True),
        ("round_sf", rounded, True),
        ("use_packed_ue8m0", packed, True),
    ):
        require(given == only, name, argument, str(only), given)


def _check_heads(
    name: str, q: Tensor, groups: int, positions: Tensor, table: Tensor, rope_dim: int, d_v: int
) -> None:
    heads, channels = q.shape[1:]
    require(channels == _CHANNELS, name, "q", f"[s_q, H, {_CHANNELS}]", list(q.shape))
    require(d_v == _CHANNELS, name, "d_v", str(_CHANNELS), d_v)
    divides = groups > 0 and heads % groups == 0
    require(divides, name, "n_wv_group", f"a divisor of the {heads} heads", groups)
    check(
        name,
        dims={"s": len(q), "R": rope_dim},
        token_positions=(positions, "s", INT32),
        cos_sin_cache=(table, "_ R", FLOAT32_UP),
    )


def _query_heads(q: Tensor, positions: Tensor, table: Tensor, eps: float | None) -> Tensor:
    """Return queries in the order of heads, rotated, and normed if ``eps`` is given."""
    tokens, heads, channels = q.shape
    chunks = q.reshape(tokens, channels // _QUERY_CHUNK, heads, _QUERY_CHUNK)
    ordered = chunks.transpose(1, 2).reshape(q.shape)
    if eps is None:
        rotated: Tensor = rope(ordered, positions, table)
        return rotated
    # The operation that norms heads also inserts rows into a cache: none, here.
    entry = get_layout(MAIN_FP8).row_elements
    nowhere = torch.empty((0, 1, entry), dtype=torch.uint8, device=q.device)
    normed: Tensor = qnorm_rope_kv_insert(
        ordered, ordered[:, 0], nowhere, positions[:0], positions, table, eps
    )
    return normed


def _cast(out: Tensor, positions: Tensor, table: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Rotate heads [T, H, D] back; return codes and packed scales in FlashMLA's order."""
    codes, scales = inverse_rope_fp8_quant(
        out,
        positions,
        table,
        n_groups=groups,
        quant_block=_CODE_CHUNK,
        amax_floor=ACTIVATION_AMAX_FLOOR,
    )
    of_group = out.shape[1] // groups
    ordered = _interleaved(codes.view(torch.uint8), 2, of_group, _CODE_CHUNK)
    # A power of two is its exponent's byte.
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    words = _interleaved(exponents, 2, of_group, 1).contiguous().view(torch.int32)
    by_group = _by_columns(words.transpose(0, 1)).transpose(0, 1)
    return ordered.contiguous().view(_FP8), by_group


def _interleaved(x: Tensor, dim: int, heads: int, chunk: int) -> Tensor:
    """Order a dimension by chunks of each head in turn; it was ordered by heads."""
    chunks = x.unflatten(dim, (heads, x.shape[dim] // (heads * chunk), chunk))
    return chunks.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _by_columns(words: Tensor) -> Tensor:
    """Copy [..., R, n] with stride 1 along R, and columns padded to a multiple of four rows."""
    *leading, rows, columns = words.shape
    padded = -(-rows // _ROW_STEP) * _ROW_STEP
    size = (*leading, columns, padded)
    memory = torch.empty(size, dtype=words.dtype, device=words.device)
    ordered = memory.transpose(-1, -2)[..., :rows, :]
    return ordered.copy_(words)
