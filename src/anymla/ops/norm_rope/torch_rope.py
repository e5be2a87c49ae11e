"""Rotary positions as products of complex numbers: pair (even, odd) is even + i * odd."""

from __future__ import annotations

import functools
import weakref

import numpy as np
import torch
from torch import Tensor

from anymla.ops import _host

# Every layer of a step turns by the same positions: those of a few tokens are remembered.
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
        [T, rope_dim / 2] complex, to be read only.
    """
    if positions.shape[0] > _FEW_TOKENS or not _host.on_host(positions):
        return _turns(positions, cos_sin_cache, dtype, inverse)
    # A table made in inference mode does not count its writes; nobody writes a table.
    version = 0 if cos_sin_cache.is_inference() else cos_sin_cache._version
    table = _Table(weakref.ref(cos_sin_cache), version)
    return _remembered_turns(tuple(positions.tolist()), table, dtype, inverse)


class _Table:
    """A rotary table as the key of what follows from its contents; does not keep it alive."""

    __slots__ = ("ref", "version")

    def __init__(self, ref: weakref.ref[Tensor], version: int) -> None:
        self.ref = ref
        self.version = version

    def __hash__(self) -> int:
        return hash((self.ref, self.version))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Table) or self.version != other.version:
            return False
        return self.ref() is other.ref() is not None


@functools.lru_cache(maxsize=16)
def _remembered_turns(
    positions: tuple[int, ...], table: _Table, dtype: torch.dtype, inverse: bool
) -> Tensor:
    if inverse:
        return torch.conj_physical(_remembered_turns(positions, table, dtype, False))
    cos_sin_cache = table.ref()
    assert cos_sin_cache is not None
    last = cos_sin_cache.shape[0] - 1
    rows = cos_sin_cache.numpy()[[min(max(position, 0), last) for position in positions]]
    pairs = rows.shape[1] // 2
    by = np.empty((len(positions), pairs), np.complex128 if dtype.itemsize == 8 else np.complex64)
    by.real, by.imag = rows[:, :pairs], rows[:, pairs:]
    return torch.from_numpy(by)


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
