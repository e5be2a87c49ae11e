"""Grouped experts at a model's sizes, against the bytes they must read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copy_bandwidth, matmul_rate, time_us
from anymla.bench.layer import kernel_times, sums
from anymla.bench.report import Result
from anymla.ops.moe import experts
from anymla.testing.published import FLASH, PRO

MODELS: dict[str, dict[str, Any]] = {"flash": FLASH, "pro": PRO}
TOKENS = (1, 2, 8, 32, 128, 4096)
_LIMIT = 10.0
_BATCHES = 4
_NAME = 48  # characters of a kernel's name that tell it apart


def run(models: Iterable[str], count: int, tokens: Iterable[int]) -> Iterator[Result]:
    """Experts of every model and number of tokens.

    Args:
        models: "flash" or "pro".
        count: experts that there are; tokens choose among them evenly.
        tokens: of a call.
    """
    tokens = tuple(tokens)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    yield Result("device", "copy", {"tb_per_s": bandwidth / 1e12})
    yield Result("device", "bf16 product 8192^3", {"tflops": rate / 1e12})
    with torch.inference_mode():
        for model in models:
            sizes = MODELS[model]
            d, inner = sizes["hidden_size"], sizes["moe_intermediate_size"]
            weights = random_experts(count, d, inner)
            for batch in tokens:
                chosen = sizes["num_experts_per_tok"]
                yield _experts(model, weights, batch, chosen, bandwidth, rate)
            del weights


def random_experts(count: int, d: int, inner: int) -> dict[str, Any]:
    """MXFP4 weights of random codes, with scales around those of released weights."""

    def random(low: int, high: int, *shape: int) -> list[Tensor]:
        made = torch.randint(low, high, (count, *shape), dtype=torch.uint8, device="cuda")
        return list(made)

    return {
        "w1": random(0, 256, inner, d // 2),
        "w3": random(0, 256, inner, d // 2),
        "w2": random(0, 256, d, inner // 2),
        "s1": random(116, 121, inner, d // 32),
        "s3": random(116, 121, inner, d // 32),
        "s2": random(116, 121, d, inner // 32),
    }


def _kernels(call: Callable[[], object]) -> dict[str, float]:
    return sums((name[:_NAME], taken) for name, taken in kernel_times(call))


def _experts(
    model: str,
    weights: dict[str, Any],
    tokens: int,
    chosen: int,
    bandwidth: float,
    rate: float,
) -> Result:
    count, (inner, packed) = len(weights["w1"]), weights["w1"][0].shape
    d = 2 * packed
    calls, read = [], 0
    for _ in range(_BATCHES if tokens <= 512 else 2):
        ids = torch.rand(tokens, count, device="cuda").argsort(1)[:, :chosen].int()
        read += len(ids.unique())
        call = functools.partial(
            experts,
            torch.randn(tokens, d, device="cuda").bfloat16(),
            ids,
            torch.rand(tokens, chosen, device="cuda"),
            **weights,
            weight_format="mxfp4",
            swiglu_limit=_LIMIT,
            quantize_activations=True,
        )
        calls.append(call)
    microseconds = time_us(calls)
    visited = read / len(calls)
    matrices = 3 * inner * d
    moved = visited * (matrices // 2 + matrices // 32)
    flops = 2 * tokens * chosen * matrices
    return Result(
        "experts",
        f"{model} experts, mxfp4, {count} of them, {tokens} tokens",
        {
            "us": round(microseconds, 1),
            "visited_experts": round(visited, 1),
            "bytes_us": round(moved / bandwidth * 1e6, 1),
            "gb_per_s": round(moved / microseconds * 1e-3, 1),
            "share_of_copy": round(moved / microseconds * 1e6 / bandwidth, 3),
            "tflops": round(flops / microseconds * 1e-6, 1),
            "share_of_product": round(flops / microseconds * 1e6 / rate, 3),
            "kernels_us": _kernels(calls[0]),
        },
    )
