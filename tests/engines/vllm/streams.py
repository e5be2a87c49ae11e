"""Calls of the hyper-connection functions that vLLM's CUDA models use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS, STREAMS, WIDTH = 5, 4, 256
GATES = (2 + STREAMS) * STREAMS
NUMBERS = (1e-6, 1e-6, 1e-6, 2.0, 20)  # three epsilons, factor on the post gates, iterations


def calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments and keywords by name, for tensors drawn at random."""
    x, weight, streams = bf16(TOKENS, WIDTH), bf16(WIDTH), bf16(TOKENS, STREAMS, WIDTH)
    gates = torch.rand(TOKENS, STREAMS, 1), torch.rand(TOKENS, STREAMS, STREAMS)
    fn, scale, base = torch.randn(GATES, STREAMS * WIDTH) / 32, torch.randn(3), torch.randn(GATES)
    site, normed = (fn, scale, base, *NUMBERS), {"norm_weight": weight, "norm_eps": 1e-6}
    return {
        "mhc_pre_tilelang": ((streams, *site), normed),
        "mhc_pre_broadcast_tilelang": ((x, *site), normed | {"fn_broadcast": fn}),
        "mhc_post_tilelang": ((x, streams, *gates), {}),
        "mhc_fused_post_pre_tilelang": (
            (x, streams, *gates, *site),
            normed | {"n_splits": 1, "tile_n": 1},
        ),
    }


def bf16(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape).to(torch.bfloat16)
