"""Sinkhorn normalisation of many small matrices, at the price of few calls.

An N x N matrix (N = 4) is divided 39 times by its column or row sums, so few tokens pay for calls,
not for arithmetic: on one core 230 us as torch calls, 40 us as the NumPy products below. One or two
tokens go through ``torch_few`` instead.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anymla.ops import _host


def sinkhorn(logits: Tensor, *, eps: float, iters: int) -> Tensor:
    """See reference.sinkhorn: [T, N, N] logits to [T, N, N] nearly doubly stochastic matrices."""
    c = torch.softmax(logits, dim=-1).add_(eps)
    if _host.on_host(c):
        return _balance_numpy(c, eps, iters)
    # Sums, not products with a matrix of ones: those might be computed in TF32.
    c.div_(c.sum(dim=-2, keepdim=True).add_(eps))
    for _ in range(iters - 1):
        c.div_(c.sum(dim=-1, keepdim=True).add_(eps))
        c.div_(c.sum(dim=-2, keepdim=True).add_(eps))
    return c


@functools.cache
def _summing_matrices(n: int, eps: float, dtype: Any) -> tuple[Any, Any]:
    """Constants of [N^2 + 1, N^2 + 1] that turn matrices into their row, and column, sums + eps.

    A matrix is a row of N^2 numbers followed by a 1, which carries eps into each sum and whose own
    sum is 1, so that it survives the division.
    """
    identity, ones = np.eye(n), np.ones((n, n))
    matrices = []
    for pattern in (np.kron(identity, ones), np.kron(ones, identity)):
        matrix = np.zeros((n * n + 1, n * n + 1), dtype)
        matrix[:-1, :-1] = pattern
        matrix[-1] = eps
        matrix[-1, -1] = 1
        matrices.append(matrix)
    return matrices[0], matrices[1]


def _balance_numpy(c: Tensor, eps: float, iters: int) -> Tensor:
    tokens, n, _ = c.shape
    given = c.view(tokens, n * n).numpy()
    rows, columns = _summing_matrices(n, eps, given.dtype)
    flat = np.empty((tokens, n * n + 1), given.dtype)
    flat[:, :-1] = given
    flat[:, -1] = 1
    sums = np.empty_like(flat)
    with np.errstate(all="ignore"):  # NaN streams give NaN gates, as in torch
        np.dot(flat, columns, sums)
        np.divide(flat, sums, flat)
        for _ in range(iters - 1):
            np.dot(flat, rows, sums)
            np.divide(flat, sums, flat)
            np.dot(flat, columns, sums)
            np.divide(flat, sums, flat)
    return torch.from_numpy(flat[:, :-1]).view(tokens, n, n)
