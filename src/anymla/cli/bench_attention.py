"""``anymla bench attention``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from anymla.bench.report import Result
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import (
    gpu_facts,
    json_option,
    require_cases,
    require_gpu,
    require_known,
    tell,
)

PART = "decode attention beside FlashMLA"
V32 = "decode attention over V3.2's rows beside FlashMLA"
END = "decode attention with FP8 heads"
# What the label says of a shape.
_HIDDEN = ("batch", "rows", "heads", "extra", "page", "ragged", "lengths", "backend", "width")
# What was asked of a shape, by heads: times as fast as FlashMLA.
_LEAST = {8: 1.6, 16: 1.6, 32: 1.6}
_LEAST_V32 = 0.9


@click.command()
@json_option
@click.option("--backend", default="gluon_sm90", show_default=True, help="Of sparse_attention.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA, which must be importable.")
@click.option(
    "--vllm-xpu", is_flag=True, help="Instead: portable Triton next to vLLM's path for Intel XPU."
)
@click.option("--v32", is_flag=True, help="Instead: over the rows of DeepSeek-V3.2.")
@click.option("--fused-end", is_flag=True, help="Instead: with FP8 heads, fused and apart.")
@click.option("--planned", is_flag=True, help="With work shared out once for all calls.")
@click.option("--heads", type=click.IntRange(min=1), multiple=True, help="Only these; repeatable.")
def attention(
    json_file: Path | None,
    backend: str,
    flash_mla: bool,
    vllm_xpu: bool,
    v32: bool,
    fused_end: bool,
    planned: bool,
    heads: tuple[int, ...],
) -> None:
    """Time attention during decoding on the GPU, over the paged FP8 caches."""
    from anymla.bench import decode_end, flash_mla_v32, portable_decode
    from anymla.bench import flash_mla_decode as decode
    from anymla.bench.layer_rival import flash_mla_module
    from anymla.ops.sparse_attention import sparse_attention, sparse_attention_fp8_quant

    shapes: tuple[Any, ...]
    if vllm_xpu + v32 + fused_end > 1:
        raise BadInput("one of --vllm-xpu, --v32 and --fused-end")
    if planned and (vllm_xpu or v32 or fused_end):
        raise BadInput("--planned is of the comparison without --vllm-xpu, --v32 and --fused-end")
    if vllm_xpu and flash_mla:
        raise BadInput("--vllm-xpu is next to vLLM's path alone, not --flash-mla")
    if vllm_xpu and backend != "triton" and _was_given("backend"):
        raise BadInput(f"--backend {backend}: --vllm-xpu is of triton")
    operation = sparse_attention_fp8_quant if fused_end else sparse_attention
    require_known("--backend", [backend], operation.backends)
    if vllm_xpu:
        shapes = tuple(portable_decode.shapes())
    elif v32:
        shapes = tuple(flash_mla_v32.production())
    elif fused_end:
        shapes = tuple(decode_end.shapes())
    else:
        shapes = (*decode.single(), *decode.shards(), *decode.production(), *decode.others())
    chosen = require_cases(
        " ".join(f"--heads {count}" for count in heads),
        (shape for shape in shapes if not heads or shape.heads in heads),
        sorted({shape.heads for shape in shapes}),
    )
    require_gpu()
    module = flash_mla_module(importlib.import_module) if flash_mla else None
    compare: Callable[..., Result]
    if vllm_xpu:
        rival = portable_decode.xpu_module(importlib.import_module)
        compare = partial(portable_decode.compare, module=rival)
    elif v32:
        compare = partial(_v32, module=module, backend=backend)
    elif fused_end:
        compare = partial(_end, module=module, backend=backend)
    else:
        compare = partial(_v4, module=module, backend=backend, planned=planned)
    results = (compare(shape) for shape in chosen)
    tell(results, json_file, gpu_facts("anymla bench attention"), _HIDDEN)


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


def _v4(shape: Any, module: Any, backend: str, planned: bool) -> Result:
    from anymla.bench.flash_mla_decode import compare

    return as_result(shape, compare(shape, module, backend, planned=planned))


def _v32(shape: Any, module: Any, backend: str) -> Result:
    from anymla.bench.flash_mla_v32 import compare

    return v32_result(compare(shape, module, backend))


def _end(shape: Any, module: Any, backend: str) -> Result:
    from anymla.bench.decode_end import compare

    return end_result(compare(shape, module, backend))


def v32_result(row: dict[str, Any]) -> Result:
    """A row of ``flash_mla_v32`` with what was asked of it."""
    values = {name: value for name, value in row.items() if name != "label"}
    if "ratio" not in row:
        return Result(V32, row["label"], values)
    target = f"at least {_LEAST_V32:g} times FlashMLA's speed"
    return Result(V32, row["label"], values, target=target, met=row["ratio"] >= _LEAST_V32)


def end_result(row: dict[str, Any]) -> Result:
    """A row of ``decode_end``: fused is to be no slower than apart, with the same bytes."""
    values = {name: value for name, value in row.items() if name != "label"}
    met = row["same_bytes"] and row["microseconds"] <= row["apart_microseconds"]
    target = "the bytes of separate kernels, in no more time"
    return Result(END, f"{row['label']}, FP8 heads", values, target=target, met=met)


def as_result(shape: object, row: dict[str, object]) -> Result:
    """A row of the benchmark with what was asked of it, if FlashMLA ran beside it."""
    ratio = row.get("ratio")
    least = _LEAST.get(getattr(shape, "heads", 0), 1.0)
    values = {name: value for name, value in row.items() if name != "label"}
    label = str(row["label"])
    if not isinstance(ratio, float):
        return Result(PART, label, values)
    target = f"at least {least:g} times FlashMLA's speed"
    return Result(PART, label, values, target=target, met=ratio >= least)
