"""Rotary positions as products of complex numbers: pair (even, odd) is even + i * odd."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anymla.ops import _host

# Up to so many tokens NumPy makes the turns in a third of torch's time. They are not kept: a table
# can be written without torch's counting it, and remembering saves a microsecond or two.
_FEW_TOKENS = 16


def turns(
    positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype, *, inverse: bool = False
) -> Tensor:
    """Unit complex numbers that rotate the pairs of each token.

    Args:
        positions: [T] int64; read clamped to the table.
        cos_sin_cache: [L, rope_dim], L >= 1.
        dtype: float32 or float64, precision of the result.
        inverse: turn backwards.

    Returns:
        [T, rope_dim / 2] complex.
    """
    if positions.shape[0] > _FEW_TOKENS or not _host.on_host(positions):
        return _turns(positions, cos_sin_cache, dtype, inverse)
    rows = cos_sin_cache.detach().numpy().take(positions.numpy(), 0, mode="clip")
    pairs = rows.shape[1] // 2
    by = np.empty((len(rows), pairs), np.complex128 if dtype.itemsize == 8 else np.complex64)
    by.real, by.imag = rows[:, :pairs], rows[:, pairs:]
    return torch.from_numpy(np.conjugate(by, out=by) if inverse else by)


def _turns(positions: Tensor, table: Tensor, dtype: torch.dtype, inverse: bool) -> Tensor:
    rows = table.index_select(0, positions.clamp(0, table.shape[0] - 1))
    cos, sin = rows.to(dtype).chunk(2, dim=-1)
    return torch.complex(cos, -sin if inverse else sin)


def rotate_(x: Tensor, by: Tensor) -> Tensor:
    """Rotate the last ``2 * by.shape[1]`` channels of x in place.

    Args:
        x: [T, ..., D] contiguous, of the precision of ``by``, D even.
        by: [T, rope_dim / 2] complex, from ``turns``.

    Returns:
        x.
    """
    if by.shape[0] != 1:
        by = by.view(by.shape[0], *(1,) * (x.ndim - 2), by.shape[1])
    x.view(by.dtype)[..., -by.shape[-1] :].mul_(by)
    return x


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """See ``interface.rope``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tail = x[..., -cos_sin_cache.shape[1] :]
    turned = tail.to(wide, copy=True, memory_format=torch.contiguous_format)
    rotate_(turned, turns(positions, cos_sin_cache, wide, inverse=inverse))
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., -cos_sin_cache.shape[1] :] = turned
    return out
