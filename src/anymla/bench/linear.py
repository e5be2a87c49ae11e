"""The FP8 products of a decode layer, each alone, and all of them one after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for, copy_bandwidth, time_us
from anymla.bench.report import Result
from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.linear import fp8_block_linear, grouped_output_projection_fp8, linear_float32
from anymla.testing.published import FLASH, PRO

MODELS: dict[str, dict[str, Any]] = {"flash": FLASH, "pro": PRO}
TOKENS = (1, 8, 16, 32, 64, 128)
_LAYERS = 3
_HOPPER = "gluon_sm90"
Shape = tuple[str, int, int, int]


def products(sizes: dict[str, Any]) -> list[Shape]:
    """Name, groups, rows of a group and channels of every product, in a layer's order."""
    d, rank, inner = sizes["hidden_size"], sizes["q_lora_rank"], sizes["moe_intermediate_size"]
    heads, dim, groups = sizes["num_attention_heads"], sizes["head_dim"], sizes["o_groups"]
    return [
        ("wq_a, wkv", 1, rank + dim, d),
        ("wq_b", 1, heads * dim, rank),
        ("wo_a", groups, sizes["o_lora_rank"], heads // groups * dim),
        ("wo_b", 1, d, groups * sizes["o_lora_rank"]),
        ("shared w1, w3", 1, 2 * inner, d),
        ("shared w2", 1, d, inner),
    ]


def run(models: Iterable[str], tokens: Iterable[int]) -> Iterator[Result]:
    """Every product, then a layer's, then the compressors', for every number of tokens.

    Args:
        models: "flash" or "pro".
        tokens: of a call.
    """
    tokens = tuple(tokens)
    bandwidth = copy_bandwidth()
    yield Result("device", "copy", {"tb_per_s": bandwidth / 1e12})
    with torch.inference_mode():
        for model in models:
            shapes = products(MODELS[model])
            weights = {shape: _weights(shape) for shape in shapes}
            for batch in tokens:
                calls = {shape: _calls(shape, weights[shape], batch) for shape in shapes}
                yield _layer(model, calls, batch, bandwidth)
                for shape in shapes:
                    name, groups, n, k = shape
                    label = f"{model} {name} {groups * n} x {k}, {batch} tokens"
                    size = groups * n * k
                    flops = 2 * batch * size
                    yield _row("product", label, calls[shape], size, flops, bandwidth)
            width, rows = MODELS[model]["hidden_size"], 4 * MODELS[model]["head_dim"]
            rows += 4 * MODELS[model]["index_head_dim"] + MODELS[model]["index_n_heads"]
            for batch in tokens:
                x = torch.randn(batch, width, device="cuda").bfloat16()
                plain = [
                    functools.partial(
                        linear_float32, x, torch.randn(rows, width, device="cuda").bfloat16()
                    )
                    for _ in range(copies_for(2 * rows * width))
                ]
                label = f"{model} compressors {rows} x {width} bfloat16, {batch} tokens"
                size = rows * width
                yield _row("product", label, plain, 2 * size, 2 * batch * size, bandwidth)


def _weights(shape: Shape) -> list[tuple[Tensor, Tensor]]:
    _, groups, n, k = shape
    made = []
    for _ in range(max(_LAYERS, copies_for(groups * n * k))):
        codes = torch.randint(0, 256, (groups, n, k), dtype=torch.uint8, device="cuda")
        codes[(codes & 127) == 127] = 0  # no NaN
        scales = torch.randint(118, 124, (groups, n // 128, k // 128), device="cuda")
        made.append((codes, torch.exp2(scales.float() - 127)))
    return made


def _calls(
    shape: Shape, weights: list[tuple[Tensor, Tensor]], tokens: int
) -> list[Callable[[], Tensor]]:
    """One call for every weight, of activations that come quantised."""
    _, groups, _, k = shape
    x = torch.randn(tokens * groups, k, device="cuda").bfloat16()
    codes, scales = quantize_fp8_rows(x)
    if groups > 1:
        heads = codes.view(torch.float8_e4m3fn).view(tokens, groups, k)
        scales = scales.view(tokens, groups, -1)
        return [
            functools.partial(grouped_output_projection_fp8, heads, scales, *weight)
            for weight in weights
        ]
    rows = QuantizedRows.empty(tokens, k, x.device)
    rows.codes[:tokens], rows.scales[:tokens] = codes, scales
    given: dict[str, Any] = {"codes": rows.codes, "code_scales": rows.scales}
    return [
        functools.partial(
            fp8_block_linear, x, codes[0], scales[0], quantize_activations=True, **given
        )
        for codes, scales in weights
    ]


def _layer(
    model: str,
    calls: dict[Shape, list[Callable[[], Tensor]]],
    tokens: int,
    bandwidth: float,
) -> Result:
    read = sum(groups * n * k for _, groups, n, k in calls)
    label = f"{model}, {len(calls)} products of a layer, {tokens} tokens"

    def layers() -> list[Tensor]:
        return [each[i]() for i in range(_LAYERS) for each in calls.values()]

    size = _LAYERS * read
    return _row("layer", label, [layers], size, 2 * tokens * size, bandwidth, _LAYERS)


def _row(
    kind: str,
    label: str,
    calls: Sequence[Callable[[], Any]],
    read: int,
    flops: int,
    bandwidth: float,
    parts: int = 1,
) -> Result:
    """Times, and those of what there is besides the kernels for Hopper."""
    microseconds = time_us(calls) / parts
    with _without_hopper():
        others = time_us(calls) / parts
    least = read / parts / bandwidth * 1e6
    values = {
        "us": round(microseconds, 1),
        "others_us": round(others, 1),
        "bytes_us": round(least, 1),
        "gb_per_s": round(read / parts / microseconds * 1e-3, 1),
        "share_of_copy": round(least / microseconds, 3),
        "tflops": round(flops / parts / microseconds * 1e-6, 1),
    }
    return Result(kind, label, values)


@contextlib.contextmanager
def _without_hopper() -> Iterator[None]:
    operations = (fp8_block_linear, grouped_output_projection_fp8, linear_float32)
    with contextlib.ExitStack() as patches:
        for operation in operations:
            rest = [each for each in operation.backends.values() if each.name != _HOPPER]
            patches.enter_context(operation.with_backends(rest))
        yield
