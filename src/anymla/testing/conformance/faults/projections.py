"""Deliberate faults of linear layers, experts and choices, each with the cases it is meant for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.faults.fault import GOOD, fault


@fault("fp8_block_linear", "M7")
def scales_of_the_block_before(x: Tensor, weight: Tensor, scale: Tensor, **rest: Any) -> Tensor:
    return GOOD.fp8_block_linear(x, weight, scale.roll(1, 0), **rest)


@fault("grouped_output_projection", "M8")
def heads_not_rotated_back(o: Tensor, positions: Tensor, *rest: Any) -> Tensor:
    return GOOD.grouped_output_projection(o, torch.zeros_like(positions), *rest)


@fault("route_biased", "M9")
def bias_within_the_weights(
    x: Tensor, gate: Tensor, bias: Tensor, *, scale: float, **rest: Any
) -> tuple[Tensor, Tensor]:
    ids, _ = GOOD.route_biased(x, gate, bias, scale=scale, **rest)
    scores = torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt() + bias
    share = scores.gather(1, ids.long())
    return ids, (share / share.sum(1, keepdim=True) * scale).to(torch.float32)


@fault("experts", "M10")
def nibbles_swapped(
    x: Tensor, ids: Tensor, weights: Tensor, w1: list[Tensor], *others: Any, **rest: Any
) -> Tensor:
    return GOOD.experts(x, ids, weights, [each << 4 | each >> 4 for each in w1], *others, **rest)


@fault("experts", "M10")
def no_limit(*args: Any, swiglu_limit: float, **rest: Any) -> Tensor:
    return GOOD.experts(*args, swiglu_limit=100.0 * swiglu_limit, **rest)


@fault("experts", "M12")
def experts_2_gib_away_are_zeros(
    x: Tensor, ids: Tensor, weights: Tensor, *lists: list[Tensor], **rest: Any
) -> Tensor:
    """Read as a kernel does that addresses the first tensor by 32 bits."""

    def read(tensors: list[Tensor]) -> list[Tensor]:
        first = [each.data_ptr() for each in tensors[:1]]
        far = [abs(each.data_ptr() - first[0]) >= 1 << 31 for each in tensors]
        return [torch.zeros_like(e) if away else e for e, away in zip(tensors, far, strict=True)]

    return GOOD.experts(x, ids, weights, *map(read, lists), **rest)


@fault("best_logits", "M11")
def the_last_of_equals(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, token, log_sum = GOOD.best_logits(logits.flip(1))
    return value, logits.shape[1] - 1 - token, log_sum
