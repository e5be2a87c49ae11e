"""``anymla bench attention``."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from anymla.bench.report import Result
from anymla.cli.bench_rows import gpu_facts, json_option, require_gpu, tell

PART = "decode attention beside FlashMLA"
# What the label says of a shape.
_HIDDEN = ("batch", "rows", "heads", "extra", "page", "ragged", "lengths", "backend")
# What was asked of a shape, by heads: times as fast as FlashMLA.
_LEAST = {8: 1.6, 16: 1.6, 32: 1.6}


@click.command()
@json_option
@click.option("--backend", default="gluon_sm90", show_default=True, help="Of sparse_attention.")
@click.option("--flash-mla", is_flag=True, help="Next to FlashMLA, which must be importable.")
@click.option(
    "--vllm-xpu", is_flag=True, help="Instead: portable Triton next to vLLM's path for Intel XPU."
)
@click.option("--heads", type=click.IntRange(min=1), multiple=True, help="Only these; repeatable.")
def attention(
    json_file: Path | None, backend: str, flash_mla: bool, vllm_xpu: bool, heads: tuple[int, ...]
) -> None:
    """Time attention during decoding on the GPU, over the paged FP8 caches."""
    from anymla.bench import flash_mla_decode as decode
    from anymla.bench import portable_decode
    from anymla.bench.layer_rival import flash_mla_module

    require_gpu()
    if vllm_xpu:
        rival = portable_decode.xpu_module(importlib.import_module)
        shapes = tuple(portable_decode.shapes())
    else:
        module = flash_mla_module(importlib.import_module) if flash_mla else None
        shapes = (*decode.single(), *decode.shards(), *decode.production(), *decode.others())
    chosen = [shape for shape in shapes if not heads or shape.heads in heads]
    if vllm_xpu:
        results = (portable_decode.compare(shape, rival) for shape in chosen)
    else:
        results = (as_result(each, decode.compare(each, module, backend)) for each in chosen)
    tell(results, json_file, gpu_facts("anymla bench attention"), _HIDDEN)


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
