"""Deliberate faults of rotary positions, each with its intended cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.expected import table
from anymla.testing.conformance.faults.fault import GOOD, fault


@fault("rope", "R4", "R1")
def halves_instead_of_pairs(x: Tensor, positions: Tensor, table: Tensor, **rest: Any) -> Any:
    order = torch.arange(64).view(2, 32).T.flatten()
    shuffled = torch.cat((x[..., :448], x[..., 448:][..., order]), -1)
    rotated = GOOD.rope(shuffled, positions, table, **rest)
    return torch.cat((rotated[..., :448], rotated[..., 448:][..., order.argsort()]), -1)


@fault("rope", "R4")
def inverse_turns_forward(x: Tensor, positions: Tensor, table: Tensor, **rest: Any) -> Any:
    return GOOD.rope(x, positions, table)


@fault("rope", "R1", "R4")
def bases_swapped(x: Tensor, positions: Tensor, cos_sin: Tensor, **rest: Any) -> Any:
    plain = table(len(cos_sin), compressed=False)
    other = table(len(cos_sin), compressed=torch.equal(cos_sin, plain))
    return GOOD.rope(x, positions, other, **rest)


@fault("qnorm_rope_kv_insert", "C5", "C6")
def keys_rotated_one_position_late(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, *args: Any, **rest: Any
) -> Any:
    rotated = GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, positions, *args, **rest)
    late = (positions + (len(positions) > 1)).clamp(max=len(args[0]) - 1)
    GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, late, *args, **rest)
    return rotated
