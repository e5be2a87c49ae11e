"""RMS norms and RoPE in torch; a pair of channels rotates as the complex number even + i * odd."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, HEAD_AMAX_FLOOR, quantize_fp8_rows
from anymla.ops import _host

# Elements processed at a time on the host: 1 MiB of float32, which fits in a core's own cache.
BLOCK_ELEMENTS = 1 << 18
# Up to this many tokens, NumPy reads the table in a third of torch's time. Nothing is cached: a
# table can change without torch's version counter, and caching saves only a microsecond or two.
_MOST_NUMPY_TOKENS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Backend of ``norm_rope.rms_norm`` in torch; see its contract."""
    width = x.shape[-1]
    if x.numel() <= BLOCK_ELEMENTS or not _host.on_host(x):
        return _rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, step = x.reshape(-1, width), max(1, BLOCK_ELEMENTS // width)
    for target, some in zip(out.view(-1, width).split(step), rows.split(step), strict=True):
        target.copy_(_rms_norm(some, weight, eps))
    return out


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if _host.on_host(x):
        return torch.mul(x, inverse_rms(x, wide, eps)).mul_(weight).to(x.dtype)
    width = (x.shape[-1],)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, width, weight, eps)
    return F.rms_norm(x.to(wide), width, weight.to(wide), eps).to(x.dtype)


def norm_heads(q: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Norm every head of q [T, H, D] without a weight, as a new contiguous tensor of ``dtype``."""
    if not _host.on_host(q):
        return F.rms_norm(q.to(dtype), (q.shape[-1],), None, eps)
    return torch.mul(q.contiguous(), inverse_rms(q, dtype, eps))


def inverse_rms(x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Return ``1 / sqrt(mean(x^2) + eps)`` of rows [..., D] as [..., 1], computed in ``dtype``."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    floor = _constant(eps, dtype, x.device)
    return torch.addcmul(floor, norms, norms, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Backend of ``norm_rope.rope`` in torch; see its contract."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tail = x[..., -cos_sin_cache.shape[1] :]
    rotated = tail.to(wide, copy=True, memory_format=torch.contiguous_format)
    rotate_(rotated, freqs_cis(positions, cos_sin_cache, wide, inverse=inverse))
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., -cos_sin_cache.shape[1] :] = rotated
    return out


def freqs_cis(
    positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype, *, inverse: bool = False
) -> Tensor:
    """Return ``cos + i sin`` of every channel pair of each token.

    Args:
        positions: positions of the tokens, [T] int64; clamped to the table.
        cos_sin_cache: cosines then sines by position, [L, rope_dim], L >= 1.
        dtype: precision of the result, float32 or float64.
        inverse: True for ``cos - i sin``, the inverse rotation.

    Returns:
        Complex factors of all pairs, [T, rope_dim / 2].
    """
    if positions.shape[0] > _MOST_NUMPY_TOKENS or not _host.on_host(positions):
        return _freqs_cis(positions, cos_sin_cache, dtype, inverse)
    rows = cos_sin_cache.detach().numpy().take(positions.numpy(), 0, mode="clip")
    pairs = rows.shape[1] // 2
    cis = np.empty((len(rows), pairs), np.complex128 if dtype.itemsize == 8 else np.complex64)
    cis.real, cis.imag = rows[:, :pairs], rows[:, pairs:]
    return torch.from_numpy(np.conjugate(cis, out=cis) if inverse else cis)


def _freqs_cis(positions: Tensor, table: Tensor, dtype: torch.dtype, inverse: bool) -> Tensor:
    rows = table.index_select(0, positions.clamp(0, table.shape[0] - 1))
    cos, sin = rows.to(dtype).chunk(2, dim=-1)
    return torch.complex(cos, -sin if inverse else sin)


def rotate_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate the last ``2 * cis.shape[1]`` channels of x in place.

    Args:
        x: channels to rotate, [T, ..., D] contiguous, D even, of the precision of ``cis``.
        cis: complex factors from ``freqs_cis``, [T, rope_dim / 2].

    Returns:
        The argument x, rotated in place.
    """
    if cis.shape[0] != 1:
        cis = cis.view(cis.shape[0], *(1,) * (x.ndim - 2), cis.shape[1])
    x.view(cis.dtype)[..., -cis.shape[-1] :].mul_(cis)
    return x


def inverse_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    quant_block: int = FP8_BLOCK,
    amax_floor: float = HEAD_AMAX_FLOOR,
) -> tuple[Tensor, Tensor]:
    """Backend of ``linear.inverse_rope_fp8_quant`` in torch; see its contract."""
    tokens, heads, dim = o.shape
    wide = torch.promote_types(o.dtype, torch.float32)
    rotated = o.to(wide, copy=True, memory_format=torch.contiguous_format)
    rotate_(rotated, freqs_cis(positions, cos_sin_cache, wide, inverse=True))
    groups = rotated.view(tokens, n_groups, heads // n_groups * dim)
    codes, scales = quantize_fp8_rows(groups, quant_block, amax_floor)
    return codes.view(torch.float8_e4m3fn), scales
