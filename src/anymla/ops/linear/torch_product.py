"""The matrix product of every linear layer, and the way of a single row on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional

from anymla.ops import _host


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight^T``, accumulated in float32 or wider and rounded once.

    oneDNN, which torch asks for bfloat16 products on CPUs, sets up and packs more than a single
    row is worth; torch's own matrix-vector product also accumulates in float32 and takes a third
    of the time for 256 x 128 values, two thirds for 4096 x 256 (one AVX512-BF16 core). The switch
    is global, but all that another thread could see of it is speed.

    Args:
        x: [..., K] floating point.
        weight: [N, K] of x's dtype.

    Returns:
        [..., N] of x's dtype.
    """
    return row_products([(x, weight)])[0] if is_row(x) else functional.linear(x, weight)


def row_products(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """``product`` of several pairs (x, weight), each x a row by ``is_row``."""
    if not mkldnn.enabled:
        return [functional.linear(x, weight) for x, weight in pairs]
    mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
    try:
        return [functional.linear(x, weight) for x, weight in pairs]
    finally:
        mkldnn.enabled = True  # type: ignore[assignment]


def is_row(x: Tensor) -> bool:
    """Whether x [..., K] is one bfloat16 row on the host, for which calls are cheap."""
    return x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and _host.on_host(x)
