"""Grouped experts at a model's sizes, against the bytes they must read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import sums
from anymla.bench.runner import Call, Case, Clock, Subject, Values, Verdict, rounded
from anymla.ops.moe import experts
from anymla.ops.moe.shapes import MODELS

TOKENS = (1, 2, 8, 32, 128, 4096)
_LIMIT = 10.0
_BATCHES = 4
_NAME = 48  # characters of a kernel's name that tell it apart


def cases(
    models: Iterable[str], count: int, tokens: Iterable[int], backends: Iterable[str] = ()
) -> Iterator[Case]:
    """Experts of every model and number of tokens.

    Args:
        models: "flash" or "pro".
        count: experts that there are; tokens choose among them evenly.
        tokens: of a call.
        backends: timed beside what is chosen, on the same inputs.
    """
    tokens, backends = tuple(tokens), tuple(backends)
    for model in models:
        shape = MODELS[model](1, count)
        # Held for all numbers of tokens.
        weights = functools.cache(functools.partial(random_experts, count, shape.d, shape.inner))
        for batch in tokens:
            yield Case(
                "experts",
                f"{model} experts, mxfp4, {count} of them, {batch} tokens",
                functools.partial(_subjects, weights, batch, shape.experts_per_token, backends),
                judge=_row,
            )


def random_experts(count: int, d: int, inner: int, device: torch.device) -> dict[str, Any]:
    """MXFP4 weights of random codes, with scales around those of released weights."""

    def random(low: int, high: int, *shape: int) -> list[Tensor]:
        made = torch.randint(low, high, (count, *shape), dtype=torch.uint8, device=device)
        return list(made)

    return {
        "w1": random(0, 256, inner, d // 2),
        "w3": random(0, 256, inner, d // 2),
        "w2": random(0, 256, d, inner // 2),
        "s1": random(116, 121, inner, d // 32),
        "s3": random(116, 121, inner, d // 32),
        "s2": random(116, 121, d, inner // 32),
    }


def _subjects(
    made: Callable[[torch.device], dict[str, Any]],
    tokens: int,
    chosen: int,
    backends: tuple[str, ...],
    clock: Clock,
) -> Iterator[Subject]:
    device, weights = clock.device, made(clock.device)
    count, (inner, packed) = len(weights["w1"]), weights["w1"][0].shape
    d = 2 * packed
    calls, read = [], 0
    for _ in range(_BATCHES if tokens <= 512 else 2):
        ids = torch.rand(tokens, count, device=device).argsort(1)[:, :chosen].int()
        read += len(ids.unique())
        call = functools.partial(
            experts,
            torch.randn(tokens, d, device=device).bfloat16(),
            ids,
            torch.rand(tokens, chosen, device=device),
            **weights,
            weight_format="mxfp4",
            swiglu_limit=_LIMIT,
            quantize_activations=True,
        )
        calls.append(call)
    visited = read / len(calls)
    matrices = 3 * inner * d
    moved = visited * (matrices // 2 + matrices // 32)
    flops = 2 * tokens * chosen * matrices

    def after(us: float) -> Values:
        kernels = ((name[:_NAME], taken) for name, taken in clock.kernel_times(calls[0]))
        return {
            "visited_experts": visited,
            "bytes_us": moved / clock.copy_bandwidth() * 1e6,
            "gb_per_s": moved / us * 1e-3,
            "share_of_copy": moved / us * 1e6 / clock.copy_bandwidth(),
            "tflops": flops / us * 1e-6,
            "share_of_product": flops / us * 1e6 / clock.matmul_rate(),
            "kernels_us": sums(kernels),
        }

    yield Subject("us", calls, after=after)
    for backend in backends:
        named = [functools.partial(call, backend=backend) for call in calls]

        def distance(backend: str = backend, named: Sequence[Call] = named) -> Values:
            got, chosen = named[0]().double(), calls[0]().double()
            return {f"{backend}_distance": ((got - chosen).norm() / chosen.norm()).item()}

        def rate(us: float, backend: str = backend) -> Values:
            return {f"{backend}_tflops": flops / us * 1e-6}

        yield Subject(f"{backend}_us", named, before=distance, after=rate)


def _row(values: Values) -> tuple[Values, Verdict]:
    digits = dict.fromkeys(("us", "visited_experts", "bytes_us", "gb_per_s", "tflops"), 1)
    for name in values:
        if name.endswith(("_us", "_tflops")) and name != "kernels_us":
            digits[name] = 1
    return rounded(values, digits | {"share_of_copy": 3, "share_of_product": 3}), None
