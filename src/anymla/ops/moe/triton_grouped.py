"""Both products of experts by kernels that are given blocks of pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from anymla.ops.moe.triton_plan import make_plan
from anymla.ops.moe.triton_stack import Call, places_of
from anymla.ops.streams import scratch


@dataclasses.dataclass(frozen=True)
class Product:
    """A kernel, rows of the result of one of its programs, and row strides if it wants them."""

    kernel: Any
    rows: int
    strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How a call is cut.

    Attributes:
        pairs: of a block.
        planned: pairs of an expert share blocks; otherwise each pair is one.
        operands: of activations [n, K], and their scales.
        options: the kernels' constants.
    """

    pairs: int
    planned: bool
    operands: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    options: dict[str, Any]


def grouped_products(
    call: Call, results: Tensor, up: Product, down: Product, grouping: Grouping
) -> None:
    """Write what every pair's expert makes of its token to results [P, D].

    Args:
        call: what is multiplied.
        results: contiguous; pairs without an expert here are not written.
        up: w1 and w3, and what follows them.
        down: w2.
        grouping: see there.
    """
    ids, (count, width, d) = call.ids, call.sizes
    order, table, blocks = None, None, call.pairs
    if grouping.planned:
        plan = make_plan(ids, count, call.expert_offset, grouping.pairs)
        order, table, blocks = plan.order, plan.blocks, plan.blocks.shape[1]
    places = places_of(call)
    options = {**grouping.options, "W_UNIT": places.unit}
    inner = scratch((call.pairs, width), call.x.dtype, call.x.device)
    limit = float(call.swiglu_limit)
    given = (blocks, call.expert_offset, count)
    up.kernel[(triton.cdiv(width, up.rows), blocks)](
        *grouping.operands(call.x), ids, call.weights, order, table, *places.up, inner,
        *given, ids.shape[1], d, *up.strides, width, limit, **options,
    )  # fmt: skip
    down.kernel[(triton.cdiv(d, down.rows), blocks)](
        *grouping.operands(inner), ids, order, table, *places.down, results,
        *given, width, *down.strides, d, **options,
    )  # fmt: skip
