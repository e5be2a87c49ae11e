"""Blocks of training as functional operators of torch.library, each way one.

torch.compile, activation checkpointing and CUDA graphs see one operator forward and one backward,
and eager calls go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Gradients],
    fake: Callable[..., Any],
    *,
    learns: int,
    results: int = 1,
) -> Any:
    """Make an operator ``anymla::train_NAME`` of a function NAME, and one of its gradients.

    What the gradients compute has no gradient itself: differentiating twice raises RuntimeError.

    Args:
        forward: the function, with annotations that ``torch.library.infer_schema`` knows.
        backward: function of the results' gradients, of bools that say which inputs need one, of
            the results behind the first ``results``, and of the arguments of ``forward``; returns
            a gradient, or None if it is not needed, for each of the first ``learns`` arguments. No
            tensor that it returns may be one that it is given.
        fake: function of the arguments of ``forward``; returns empty results, contiguous.
        learns: number of leading arguments that get gradients: tensors, or None.
        results: number of leading results that have gradients. Those behind them are what the
            forward pass computes for the backward pass alone.

    Returns:
        The operator, to be called with all arguments by position.
    """
    name = f"anymla::train_{forward.__name__.strip('_')}"
    schema = torch.library.infer_schema(forward, mutates_args=())

    def run(*args: Any) -> Any:
        with torch.no_grad():
            made = forward(*args)
        if isinstance(made, Tensor):
            return made.contiguous()
        return tuple(each.contiguous() for each in made)

    def gradients(
        grads: list[Tensor], needs: list[bool], kept: list[Tensor], *args: Any
    ) -> list[Tensor]:
        with torch.no_grad():
            found = backward(grads, needs, kept, *args)
        return [
            each.contiguous() if each is not None and need else grads[0].new_empty(0)
            for each, need in zip(found, needs, strict=True)
        ]

    def gradients_fake(
        grads: list[Tensor], needs: list[bool], kept: list[Tensor], *args: Any
    ) -> list[Tensor]:
        return [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else grads[0].new_empty(0)
            for x, need in zip(args[:learns], needs, strict=True)
        ]

    operator = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    arguments = schema[1 : schema.rindex(" -> ") - 1]
    of_gradients = torch.library.custom_op(
        f"{name}_backward", gradients, mutates_args=(),
        schema=f"(Tensor[] grads, bool[] needs, Tensor[] kept, {arguments}) -> Tensor[]",
    )  # fmt: skip
    of_gradients.register_fake(gradients_fake)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = (output,) if isinstance(output, Tensor) else output
        tensors, ctx.places = [*made[results:]], []
        for each in inputs:
            many = each if isinstance(each, list) else [each]
            if not all(isinstance(one, Tensor) for one in many):
                ctx.places.append(each)
                continue
            ctx.places.append(_Place(len(tensors), len(many), isinstance(each, list)))
            tensors += many
        ctx.kept = len(made) - results
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in made[:results]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    def back(ctx: Any, *grads: Any) -> Any:
        tensors = list(ctx.saved_tensors)
        args = [each.of(tensors) if isinstance(each, _Place) else each for each in ctx.places]
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=False)
        ]
        needs = [bool(each) for each in ctx.needs_input_grad[:learns]]
        found = of_gradients(given, needs, tensors[: ctx.kept], *args)
        learnt = [each if need else None for each, need in zip(found, needs, strict=True)]
        rest = [[None] * len(each) if isinstance(each, list) else None for each in args[learns:]]
        return *learnt, *rest

    operator.register_autograd(back, setup_context=keep)
    return operator


class _Place:
    """Place of an argument among the tensors that are saved."""

    def __init__(self, first: int, count: int, many: bool) -> None:
        self.part, self.many = slice(first, first + count), many

    def of(self, tensors: list[Tensor]) -> Any:
        found = tensors[self.part]
        return found if self.many else found[0]
