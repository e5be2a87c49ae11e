"""The normalised Walsh-Hadamard transform inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _butterfly(x, HALF: tl.constexpr):
    """Replace channels that are HALF apart by their sums and differences."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    pair = tl.reshape(x, (ROWS, WIDTH // (2 * HALF), 2, HALF))
    first, second = tl.split(tl.permute(pair, (0, 1, 3, 2)))
    pair = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(pair, (ROWS, WIDTH))


@triton.jit
def hadamard(x, LOG: tl.constexpr):
    """Multiply float32 rows [N, 2^LOG] by the Sylvester-ordered Hadamard matrix times 2^(-LOG/2).

    The sums are those of ``formats.hadamard``, in the same order.
    """
    for stage in tl.static_range(LOG):
        x = _butterfly(x, 1 << stage)
    return x * (1 << LOG) ** -0.5
