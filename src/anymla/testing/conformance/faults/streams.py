"""Deliberate faults of hyper-connections, each with its intended cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.faults.fault import GOOD, fault


@fault("hc_post", "M1", "M2")
def comb_transposed(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return GOOD.hc_post(u, h, post, comb.transpose(1, 2).contiguous())


@fault("hc_pre", "M2")
def one_iteration_less(*args: Any, iters: int, **rest: Any) -> Any:
    return GOOD.hc_pre(*args, iters=iters - 1, **rest)


@fault("hc_pre", "M2")
def epsilon_of_the_norm_missing(*args: Any, norm_eps: float, **rest: Any) -> Any:
    return GOOD.hc_pre(*args, norm_eps=0.0, **rest)


@fault("hc_pre", "M1")
def tokens_after_8192_forgotten(*args: Any, **rest: Any) -> Any:
    y, post, comb = GOOD.hc_pre(*args, **rest)
    y[8192:] = 0
    return y, post, comb


@fault("hc_collapse_norm", "M3")
def gates_of_the_site_before_forgotten(h: Tensor, pre: Tensor, *args: Any, **rest: Any) -> Tensor:
    first = torch.zeros_like(pre)
    first[:, 0] = 1  # what the first sub-layer reads
    return GOOD.hc_collapse_norm(h, first, *args, **rest)


@fault("hc_gates", "M3")
def epsilon_of_v4(*args: Any, norm_eps: float, **rest: Any) -> Any:
    return GOOD.hc_gates(*args, norm_eps=1e-6, **rest)
