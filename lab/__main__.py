"""``python -m lab``: measure and build what ships, from a checkout of the repository.

Exit codes are those of ``anymla``, and 1 if a build or a gate fails.
"""

from __future__ import annotations

import click

from anymla.cli import commands
from anymla.cli.bench_rows import LAB
from lab.cli.attention import attention
from lab.cli.build_matrix import build_matrix
from lab.cli.cpu import cpu
from lab.cli.experts import experts
from lab.cli.full_size import full_size
from lab.cli.indexer import indexer
from lab.cli.layer import layer, model, traffic
from lab.cli.linear import linear
from lab.cli.prefill import prefill
from lab.cli.report import report
from lab.cli.same_code import same_code
from lab.cli.xpu import xpu_attention


@click.group(
    cls=commands.Program,
    examples=[f"{LAB} build-matrix --first file --target sm_90", f"{LAB} layer --model flash"],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Build, gate and measure these kernels, next to what else runs on this machine."""


for _command in (
    attention, build_matrix, cpu, experts, full_size, indexer, layer, linear, model, prefill,
    report, same_code, traffic, xpu_attention,
):  # fmt: skip
    main.add_command(_command)

if __name__ == "__main__":
    main(prog_name=LAB)
