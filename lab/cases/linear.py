"""FP8 products of a decode layer, each on its own, and all of them in sequence."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.bench.random_weights import random_e4m3
from anymla.bench.runner import Case, Clock, Subject, Values, Verdict, rounded
from anymla.formats.fp8_block import FP8_BLOCK, quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.linear import fp8_block_linear, grouped_output_projection_fp8, linear_float32
from anymla.ops.linear.shapes import MODELS, V41_MODELS, ProductShape

TOKENS = (1, 8, 16, 32, 64, 128)
_LAYERS = 3
_HOPPER = "gluon_sm90"
# Codes and scales of each product [N, K], in the order of the layer.
Weights = dict[ProductShape, list[tuple[Tensor, Tensor]]]


def cases(models: Iterable[str], tokens: Iterable[int]) -> Iterator[Case]:
    """Yield a layer's products, then each of them, then the compressors', for all token counts."""
    tokens = tuple(tokens)
    for model in models:
        sizes = (MODELS | V41_MODELS)[model]
        block, shapes = sizes.quant_block, sizes.products()
        if block != FP8_BLOCK:
            shapes = tuple(shape for shape in shapes if not shape.groups)
        # Held for all numbers of tokens.
        weights = functools.cache(functools.partial(_weights, shapes, block))
        for batch in tokens:
            read = sum(shape.elements for shape in shapes)
            label = f"{model}, {len(shapes)} products of a layer, {batch} tokens"
            layer = functools.partial(_layer, shapes, weights, batch, block)
            yield _case("layer", label, layer, read, batch)
            for shape in shapes:
                one = functools.partial(_product, shape, weights, batch, block)
                label = f"{model} {shape}, {batch} tokens"
                yield _case("product", label, one, shape.elements, batch)
        both = sizes.compressors[0]
        for batch in tokens if block == FP8_BLOCK else ():
            plain = functools.partial(_compressors, both, batch)
            label = f"{model} {both} bfloat16, {batch} tokens"
            yield _case("product", label, plain, both.elements, batch, width=2)


def _case(
    part: str,
    label: str,
    calls: Callable[[Clock], tuple[list[Callable[[], object]], int]],
    weights: int,
    tokens: int,
    width: int = 1,
) -> Case:
    """Make a case of the Hopper kernels' times and those of the alternatives.

    Args:
        part: name of the row's part.
        label: label of the row in reports.
        calls: made on a clock's device, and how often each does what is counted.
        weights: elements that are read.
        tokens: number of tokens of a call.
        width: bytes of an element.
    """
    read, flops = weights * width, 2 * tokens * weights

    def subjects(clock: Clock) -> Iterator[Subject]:
        made, per = calls(clock)
        yield Subject("us", made, per=per)
        yield Subject(
            "others_us",
            made,
            per=per,
            within=_without_hopper,
            after=lambda _: {"bytes_us": read / clock.copy_bandwidth() * 1e6},
        )

    def judge(values: Values) -> tuple[Values, Verdict]:
        us = values["us"]
        values["gb_per_s"] = read / us * 1e-3
        values["share_of_copy"] = values["bytes_us"] / us
        values["tflops"] = flops / us * 1e-6
        digits = dict.fromkeys(("us", "others_us", "bytes_us", "gb_per_s", "tflops"), 1)
        return rounded(values, digits | {"share_of_copy": 3}), None

    return Case(part, label, subjects, judge=judge)


def _weights(shapes: tuple[ProductShape, ...], block: int, device: torch.device) -> Weights:
    return {shape: _random_weights(shape, block, device) for shape in shapes}


def _random_weights(
    shape: ProductShape, block: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    groups, n, k = max(1, shape.groups), shape.n, shape.k
    made = []
    for _ in range(max(_LAYERS, copies_for(shape.elements))):
        codes = random_e4m3(groups, n, k, device=device)
        scales = torch.randint(118, 124, (groups, n // block, k // block), device=device)
        made.append((codes, torch.exp2(scales.float() - 127)))
    return made


def _calls(
    shape: ProductShape, weights: list[tuple[Tensor, Tensor]], tokens: int, block: int
) -> list[Callable[[], object]]:
    """Make one call per weight; activations come quantised where 128 channels share a scale."""
    groups, k = shape.groups, shape.k
    x = torch.randn(tokens * max(1, groups), k, device=weights[0][0].device).bfloat16()
    codes, scales = quantize_fp8_rows(x)
    if groups:
        heads = codes.view(torch.float8_e4m3fn).view(tokens, groups, k)
        scales = scales.view(tokens, groups, -1)
        return [
            functools.partial(grouped_output_projection_fp8, heads, scales, *weight)
            for weight in weights
        ]
    given: dict[str, Any] = {"quant_block": block}
    if block == FP8_BLOCK:
        rows = QuantizedRows.empty(tokens, k, x.device)
        rows.codes[:tokens], rows.scales[:tokens] = codes, scales
        given = {"codes": rows.codes, "code_scales": rows.scales}
    return [
        functools.partial(
            fp8_block_linear, x, codes[0], scales[0], quantize_activations=True, **given
        )
        for codes, scales in weights
    ]


def _product(
    shape: ProductShape,
    weights: Callable[[torch.device], Weights],
    tokens: int,
    block: int,
    clock: Clock,
) -> tuple[list[Callable[[], object]], int]:
    return _calls(shape, weights(clock.device)[shape], tokens, block), 1


def _layer(
    shapes: tuple[ProductShape, ...],
    weights: Callable[[torch.device], Weights],
    tokens: int,
    block: int,
    clock: Clock,
) -> tuple[list[Callable[[], object]], int]:
    calls = [_calls(shape, weights(clock.device)[shape], tokens, block) for shape in shapes]
    return [lambda: [each[i]() for i in range(_LAYERS) for each in calls]], _LAYERS


def _compressors(
    shape: ProductShape, tokens: int, clock: Clock
) -> tuple[list[Callable[[], object]], int]:
    draw = functools.partial(torch.randn, device=clock.device)
    x = draw(tokens, shape.k).bfloat16()
    return [
        functools.partial(linear_float32, x, draw(shape.n, shape.k).bfloat16())
        for _ in range(copies_for(2 * shape.elements))
    ], 1


@contextlib.contextmanager
def _without_hopper() -> Iterator[None]:
    operations = (fp8_block_linear, grouped_output_projection_fp8, linear_float32)
    with contextlib.ExitStack() as patches:
        for operation in operations:
            rest = [each for each in operation.backends.values() if each.name != _HOPPER]
            patches.enter_context(operation.with_backends(rest))
        yield
