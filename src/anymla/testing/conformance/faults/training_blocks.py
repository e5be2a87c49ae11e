"""Deliberate faults of the gradients around attention, each with its intended case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.ops.hyper_connection import reference as hyper_connection_reference
from anymla.testing.conformance.faults.fault import fault_in
from anymla.train import compressor, indexer
from anymla.train.plan import Plan
from anymla.train.windows import Windows


@fault_in("windows_of", compressor, cases=("T7",))
def the_first_window_gets_a_gradient_from_the_sequence_before(
    good: Callable[..., Windows], plan: Plan
) -> Windows:
    windows = good(plan)
    follows = windows.whole & (torch.arange(len(windows.whole)) > 0)
    return dataclasses.replace(windows, follows=follows)


@fault_in("_Teacher.mass", indexer._Teacher, cases=("T8",))
def a_teacher_without_window_and_sink(
    good: Callable[..., Tensor], teacher: Any, *args: Any
) -> Tensor:
    scores = torch.einsum("thd,ed->the", teacher.q[args[0]], teacher.entries) * teacher.scale
    mass = scores.masked_fill(~args[2].unsqueeze(1), -torch.inf).softmax(2).sum(1)
    return torch.where(args[2], mass, 0)


@fault_in("sinkhorn_grad", hyper_connection_reference, cases=("T9",))
def the_gradient_of_sinkhorns_limit(
    good: Callable[..., Tensor], logits: Tensor, dcomb: Tensor, *, eps: float, iters: int
) -> Tensor:
    return good(logits, dcomb, eps=eps, iters=50 * iters)
