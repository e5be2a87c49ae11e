"""cuDNN frontend's gradients of sparse attention on Hopper (``dsa_bwd_sm90``), as a peer.

Of the wheel ``nvidia-cudnn-frontend`` 1.32.0 and newer, which compiles at the first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def gradients(
    dout: Tensor, q: Tensor, rows: Tensor, listed: Tensor, out: Tensor, lse: Tensor, sink: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of the peer that computes dq, drows and dsink.

    Args:
        dout: gradient of the output, [T, H, 512] bfloat16.
        q: queries of all heads, [T, H, 512] bfloat16.
        rows: rows that are keys and values, [N, 512] bfloat16.
        listed: row numbers of each query, [T, K] int32; -1 names none.
        out: output of the forward pass, [T, H, 512] bfloat16.
        lse: natural logarithm of the denominators without sinks, [T, H] float32.
        sink: sink of each head, [H] float32.
    """
    module: Any = importlib.import_module("cudnn.deepseek_sparse_attention")

    def call() -> tuple[Tensor, ...]:
        found = module.sparse_attention_backward_wrapper(
            q, rows, out, dout, lse, sink, listed, softmax_scale=q.shape[2] ** -0.5
        )
        return found["dq"], found["dkv"].to(torch.float32), found["d_sink"]

    return call
