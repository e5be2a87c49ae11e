"""``anymla bench attention``."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import click
import torch

from anymla.bench.report import Result, append_rows, table

PART = "decode attention beside FlashMLA"
# What was asked of a shape, by heads: times as fast as FlashMLA.
_LEAST = {8: 1.6, 16: 1.6, 32: 1.6}


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Append the rows here, one JSON object a line.",
)
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
    from anymla.bench.environment import environment
    from anymla.bench.gpu import device_facts
    from anymla.bench.layer_rival import flash_mla_module

    if not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU on this machine")
    facts = environment("anymla bench attention") | device_facts()
    if vllm_xpu:
        rival = portable_decode.xpu_module(importlib.import_module)
        shapes = tuple(portable_decode.shapes())
    else:
        module = flash_mla_module(importlib.import_module) if flash_mla else None
        shapes = (*decode.single(), *decode.shards(), *decode.production(), *decode.others())
    results: list[Result] = []
    for shape in shapes:
        if heads and shape.heads not in heads:
            continue
        if vllm_xpu:
            result = portable_decode.compare(shape, rival)
        else:
            result = as_result(shape, decode.compare(shape, module, backend))
        results.append(result)
        if json_file is not None:
            append_rows(json_file, [result], facts)
    shown = [dataclasses.replace(each, values=_short(each.values)) for each in results]
    click.echo("\n".join(table(shown)))
    if any(result.met is False for result in results):
        click.get_current_context().exit(1)


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


def _short(values: dict[str, object]) -> dict[str, object]:
    times = ("microseconds", "flash_mla_microseconds", "us", "xpu_us", "ratio")
    shown = (*times, "error", "flash_mla_error", "xpu_error")
    return {name: values[name] for name in shown if name in values}
