"""``anymla bench``: speed and memory of this machine, next to what else runs on it."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from anymla.bench.cpu import parts
from anymla.bench.decode import PeerMissing
from anymla.bench.environment import environment
from anymla.bench.report import append_rows, table
from anymla.cli import (
    bench_attention,
    bench_experts,
    bench_full_size,
    bench_gpu,
    bench_layer,
    bench_linear,
    bench_prefill,
    bench_report,
    bench_same_code,
    bench_xpu,
    commands,
)
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import command_line, json_option
from anymla.cli.run_options import threads_option

_PARTS = ("machine", "attention", "packed", "selection", "decode", "context", "memory")


@commands.group(examples=["anymla bench cpu --quick", "anymla bench gpu"])
def command() -> None:
    """Measure speed and memory on this machine."""


@command.command(
    examples=["anymla bench cpu --quick --part selection", "anymla bench cpu --json cpu.jsonl"]
)
@json_option
@click.option("--quick", is_flag=True, help="Fewer repetitions, shorter contexts.")
@click.option(
    "--part",
    "chosen",
    multiple=True,
    type=click.Choice(_PARTS),
    help="Only this part; may be given several times.",
)
@threads_option(text="CPU threads.", default=1, show_default=True)
def cpu(json_file: Path | None, quick: bool, chosen: tuple[str, ...], threads: int) -> None:
    """Run the CPU suite: attention, packed weights, selection, a whole tiny model, context, memory.

    Everything is compared with something measured in the same process: matrix products, or
    transformers on the same checkpoint. Ends with exit code 1 if a target is missed.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    measured = environment(command_line())
    click.echo(f"{measured['cpu']}, {threads} thread(s), torch {measured['torch']}")
    missed, left_out = False, []
    for name, run in parts(quick).items():
        if chosen and name not in chosen:
            continue
        try:
            results = run()
        except PeerMissing as missing:
            click.echo(f"\n{name}: not measured: {missing}")
            left_out.append(name)
            continue
        click.echo("\n" + "\n".join(table(results)))
        missed |= any(result.met is False for result in results)
        if json_file is not None:
            append_rows(json_file, results, measured)
    if left_out and set(left_out) >= set(chosen or _PARTS):
        raise BadInput(f"--part {' --part '.join(left_out)}: nothing was measured")
    if missed:
        click.get_current_context().exit(1)


command.add_command(bench_gpu.gpu)
command.add_command(bench_gpu.indexer)
command.add_command(bench_layer.layer)
command.add_command(bench_layer.model)
command.add_command(bench_full_size.full_size)
command.add_command(bench_experts.experts)
command.add_command(bench_linear.linear)
command.add_command(bench_layer.traffic)
command.add_command(bench_attention.attention)
command.add_command(bench_prefill.prefill)
command.add_command(bench_gpu.build_matrix)
command.add_command(bench_same_code.same_code)
command.add_command(bench_xpu.xpu_attention)
command.add_command(bench_report.report)
