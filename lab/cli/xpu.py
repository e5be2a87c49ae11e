"""``python -m lab xpu-attention``."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import command_line, json_option, require_known


@commands.command("xpu-attention", examples=["python -m lab xpu-attention FOLDER --target xpu_bmg"])
@click.argument("vllm", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
@click.option("--target", "chosen", multiple=True, help="Only this of Intel's GPUs; repeatable.")
def xpu_attention(vllm: Path, json_file: Path | None, chosen: tuple[str, ...]) -> None:
    """Build decode attention for Intel's GPUs, and vLLM's path for XPU the same way; needs no GPU.

    VLLM is the folder that has vLLM's package, as its wheel unpacks; of it only Triton kernels are
    read, so that it need not be able to run.
    """
    from anymla.bench.environment import environment
    from anymla.bench.report import append_rows
    from anymla.ops.device import TARGETS, triton_version
    from lab.build_matrix import problem_of
    from lab.page.intel import intel_peer_table
    from lab.peers.vllm import UnpackedVllmXpu
    from lab.xpu_attention import measure

    known = [name for name, target in TARGETS.items() if target.backend == "xpu"]
    require_known("--target", chosen, known)
    problem = problem_of(TARGETS[known[0]])
    if problem:
        raise BadInput(f"nothing can be built for Intel's GPUs: {problem}")
    peer = UnpackedVllmXpu(vllm)
    peer.require("VLLM")
    made = environment(command_line()) | {"triton": triton_version(), "vllm": peer.version()}
    rows = []
    for name in chosen or known:
        for result in measure(TARGETS[name], peer):
            rows.append(result.row(made))
            if json_file is not None:
                append_rows(json_file, [result], made)
    click.echo("\n".join(intel_peer_table(rows)))
