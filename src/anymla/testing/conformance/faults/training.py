"""Deliberate faults of attention's gradients, each with its intended cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.testing.conformance.faults.fault import GOOD, fault

_NAME = "prefill_attention_backward"
_Gradients = tuple[Tensor, Tensor, Tensor]


def _good(*args: Any, **rest: Any) -> _Gradients:
    result: _Gradients = GOOD.prefill_attention_backward(*args, **rest)
    return result


@fault(_NAME, "T1")
def delta_of_the_output_without_the_sink(
    dout: Tensor, *args: Any, sink: Tensor | None = None, **rest: Any
) -> _Gradients:
    out, lse = args[4:6]
    delta = (dout.float() * out.float()).sum(2)
    if sink is not None:
        share = torch.sigmoid(lse - sink)
        delta = torch.where(share > 0, delta / share, delta)
    return _good(dout, *args, sink=sink, delta=delta, **rest)


@fault(_NAME, "T1")
def probabilities_without_the_sink(
    *args: Any, sink: Tensor | None = None, **rest: Any
) -> _Gradients:
    dsink = _good(*args, sink=sink, **{**rest, "mass": None})[2]
    return (*_good(*args, **rest)[:2], dsink)


@fault(_NAME, "T1")
def lse_taken_for_one_with_the_sink(
    *args: Any, sink: Tensor | None = None, **rest: Any
) -> _Gradients:
    *before, lse = args
    lse = lse if sink is None else torch.logaddexp(lse, sink.expand_as(lse))
    return _good(*before, lse, sink=sink, **rest)


@fault(_NAME, "T2")
def rows_named_twice_count_once(
    dout: Tensor, q: Tensor, rows: Tensor, ranges: Tensor, lists: Tensor | None, *args: Any,
    **rest: Any,
) -> _Gradients:  # fmt: skip
    if lists is not None:
        again = (lists.unsqueeze(2) == lists.unsqueeze(1)).tril(-1).any(2)
        lists = lists.masked_fill(again, -1)
    return _good(dout, q, rows, ranges, lists, *args, **rest)


@fault(_NAME, "T2")
def rows_that_nobody_names_are_multiplied_by_zero(
    dout: Tensor, q: Tensor, rows: Tensor, *args: Any, **rest: Any
) -> _Gradients:
    dq, drows, dsink = _good(dout, q, rows, *args, **rest)
    return dq, drows + 0 * rows, dsink


@fault(_NAME, "T3")
def a_token_without_rows_divides_zero_by_zero(*args: Any, **rest: Any) -> _Gradients:
    dq, drows, dsink = _good(*args, **rest)
    nothing = (args[6] == -torch.inf).unsqueeze(2)
    return dq.masked_fill(nothing, torch.nan), drows, dsink


@fault(_NAME, "T3")
def a_sink_that_saturates_subtracts_infinities(
    *args: Any, sink: Tensor | None = None, **rest: Any
) -> _Gradients:
    dq, drows, dsink = _good(*args, sink=sink, **rest)
    if sink is not None:
        dsink = torch.where((sink * 1.4427).isinf(), torch.nan, dsink)
    return dq, drows, dsink


@fault(_NAME, "T4")
def the_gradient_of_lse_is_dropped(
    *args: Any, dlse: Tensor | None = None, **rest: Any
) -> _Gradients:
    return _good(*args, **rest)


@fault(_NAME, "T5")
def gradients_depend_on_the_batch(*args: Any, **rest: Any) -> _Gradients:
    dq, drows, dsink = _good(*args, **rest)
    return dq, drows * (1 + 1e-6 * len(dq)), dsink


@fault(_NAME, "T6")
def the_last_row_of_a_range_is_forgotten(
    dout: Tensor, q: Tensor, rows: Tensor, ranges: Tensor, *args: Any, **rest: Any
) -> _Gradients:
    return _good(dout, q, rows, ranges - torch.tensor([0, 0, 0, 1]).int(), *args, **rest)


@fault(_NAME, "T6")
def the_teacher_is_a_softmax_over_entries_alone(
    *args: Any, mass: Tensor | None = None, **rest: Any
) -> _Gradients:
    result = _good(*args, mass=mass, **rest)
    if mass is not None:
        mass *= args[1].shape[1] / mass.sum(1, keepdim=True).clamp(min=1e-30)
    return result
