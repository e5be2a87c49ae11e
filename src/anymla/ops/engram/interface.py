"""Contracts of Engram, a memory of n-grams that is added to the residual streams.

A token's n-grams name C rows of a table, which are decoded, concatenated, and projected to a key
for each of the N streams and one value:

    rows      = decode(codes, scales)            engram_rows
    projected = rows @ wkv^T                     a linear layer
    h'_j      = h_j + g_j value                  engram_gate

Source: DeepSeek-V4.1 reference, inference/engram.py. Letters: T tokens, N streams, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.device import float32_support
from anymla.ops.registry import FLOAT32_UP, FLOATS, check, operation, require


@operation(mutates=("out",))
def engram_rows(out: Tensor, codes: Tensor, scales: Tensor, *, backend: str | None = None) -> None:
    """Decode the table rows that tokens read, and concatenate each token's.

    ``out[t, c W + i] = e4m3(codes[t, c, i]) * 2^(scales[t, c, i // (W / S)] - 127)``

    Args:
        out: buffer for the decoded rows, [T, C W] any float dtype; each value is rounded once.
        codes: e4m3 codes of the rows, [T, C, W] uint8; codes 0x7F and 0xFF give NaN.
        scales: ue8m0 scales of W / S neighbours each, [T, C, S] uint8; byte 255 gives NaN.
        backend: name of the backend that runs; None for the best that can.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or S does not divide W.
    """
    name = "engram_rows"
    sizes = check(name, codes=(codes, "T C W", torch.uint8), scales=(scales, "T C S", torch.uint8))
    width, blocks = sizes["W"], sizes["S"]
    divides = blocks > 0 and width % blocks == 0
    require(divides, name, "scales", f"[T, C, S] with S a divisor of W={width}", f"S={blocks}")
    check(name, dims={"T": sizes["T"], "R": sizes["C"] * width}, out=(out, "T R", FLOATS))
    require(out.device == codes.device, name, "out", f"on {codes.device}", out.device)


def _streams_like(h: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
    return (torch.empty_like(h, memory_format=torch.contiguous_format),)


@operation(outputs=_streams_like)
def engram_gate(
    h: Tensor, projected: Tensor, weight: Tensor, *, eps: float, backend: str | None = None
) -> Tensor:
    """Add the value to each stream, gated by how well the stream and its key agree.

    With key_j and value taken from ``projected``::

        d_j  = sum_i weight_ji h_ji key_ji / (rms(h_j) rms(key_j) sqrt(D)),
               rms(x) = sqrt(mean(x^2) + eps)
        g_j  = sigmoid(s sqrt(max(|d_j|, 1e-6))), s = -1 for d_j < 0, else 1
        h'_j = h_j + g_j value

    Args:
        h: residual streams of the tokens, [T, N, D] any float dtype.
        projected: keys of the streams in order, then the value, [T, (N + 1) D] of h's dtype.
        weight: product of the weights of the streams' and the keys' norms, [N, D] float32 (float64
            allowed).
        eps: number added to the mean squares.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        New streams h', [T, N, D] contiguous in h's dtype, rounded once.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.
    """
    parts = (h.shape[1] + 1) * h.shape[2] if isinstance(h, Tensor) and h.ndim == 3 else 0
    check(
        "engram_gate",
        dims={"P": parts},
        h=(h, "T N D", FLOATS),
        projected=(projected, "T P", h.dtype if isinstance(h, Tensor) else FLOATS),
        weight=(weight, "N D", FLOAT32_UP),
    )


_FAMILY = "anymla.ops.engram"
for _operation, _kernel in ((engram_rows, "triton_rows"), (engram_gate, "triton_gate")):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_engram")
    _operation.register_lazy("triton", f"{_FAMILY}.{_kernel}", supports=float32_support)
