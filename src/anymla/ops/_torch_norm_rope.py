"""RMS norms and RoPE in torch; a rotation is a product of complex numbers even + i * odd."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymla.formats.fp8_block import HEAD_AMAX_FLOOR, quantize_fp8_rows
from anymla.ops import _host

# Elements in flight on the host: 1 MiB of float32, which a core's own cache holds.
BLOCK_ELEMENTS = 1 << 18
# Up to so many tokens NumPy reads the table in a third of torch's time. Nothing is kept: a table
# can be written without torch's counting it, and remembering saves a microsecond or two.
_MOST_NUMPY_TOKENS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``norm_rope.rms_norm``."""
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
    """Norm every head [T, H, D] without a weight, in ``dtype``; contiguous and freshly made."""
    if not _host.on_host(q):
        return F.rms_norm(q.to(dtype), (q.shape[-1],), None, eps)
    return torch.mul(q.contiguous(), inverse_rms(q, dtype, eps))


def inverse_rms(x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of rows [..., D] as [..., 1], computed in ``dtype``."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    floor = _constant(eps, dtype, x.device)
    return torch.addcmul(floor, norms, norms, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """See ``norm_rope.rope``."""
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
    """Complex numbers ``cos + i sin`` of the pairs of each token.

    Args:
        positions: [T] int64; read clamped to the table.
        cos_sin_cache: [L, rope_dim], L >= 1.
        dtype: float32 or float64, precision of the result.
        inverse: ``cos - i sin``, the inverse rotation.

    Returns:
        [T, rope_dim / 2] complex.
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
        x: [T, ..., D] contiguous, of the precision of ``cis``, D even.
        cis: [T, rope_dim / 2] complex, from ``freqs_cis``.

    Returns:
        x.
    """
    if cis.shape[0] != 1:
        cis = cis.view(cis.shape[0], *(1,) * (x.ndim - 2), cis.shape[1])
    x.view(cis.dtype)[..., -cis.shape[-1] :].mul_(cis)
    return x


def inverse_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, n_groups: int
) -> tuple[Tensor, Tensor]:
    """See ``linear.inverse_rope_fp8_quant``."""
    tokens, heads, dim = o.shape
    wide = torch.promote_types(o.dtype, torch.float32)
    rotated = o.to(wide, copy=True, memory_format=torch.contiguous_format)
    rotate_(rotated, freqs_cis(positions, cos_sin_cache, wide, inverse=True))
    groups = rotated.view(tokens, n_groups, heads // n_groups * dim)
    codes, scales = quantize_fp8_rows(groups, floor=HEAD_AMAX_FLOOR)
    return codes.view(torch.float8_e4m3fn), scales
