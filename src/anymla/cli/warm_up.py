"""``anymla warm-up``: compile ahead of time all kernels that serving a checkpoint uses."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.files import OutputFile
from anymla.cli.numbers import count
from anymla.cli.run_options import RunOptions, run_options
from anymla.ops.kernel_archive import Shipped, export_kernels, import_kernels
from anymla.runtime.engine import Engine
from anymla.runtime.launch import launched


@commands.command(
    examples=[
        "anymla warm-up examples/tiny/checkpoint --max-requests 2 --max-seq-len 512",
        "anymla warm-up --export kernels.zip",
        "anymla warm-up --import kernels.zip",
    ],
    no_args_is_help=True,
)
@click.option(
    "--export",
    "exported",
    type=OutputFile(whole=True),
    metavar="FILE",
    help="Then write the kernels in Triton's cache for this device to FILE. Needs no checkpoint.",
)
@click.option(
    "--import",
    "imported",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="First store the kernels of FILE in Triton's cache. Needs no checkpoint.",
)
@click.option(
    "--for",
    "target",
    metavar="NAME",
    help="Device whose kernels are exported, such as sm_90; default: the one here.",
)
@count("--max-requests", default=8)
@count("--max-seq-len", default=4096)
@count("--draft-tokens", default=0, least=0)
@functools.partial(run_options, unless=("exported", "imported"))
def command(
    *,
    run: RunOptions | None,
    exported: Path | None,
    imported: Path | None,
    target: str | None,
    max_requests: int,
    max_seq_len: int,
    draft_tokens: int,
) -> None:
    """Run every size of step once, so that Triton's cache holds every kernel.

    TRITON_CACHE_DIR says where; the directory serves all machines with the same GPU architecture
    and the same versions of the packages. Serve with the same options, or smaller ones.

    --export writes the cache's kernels to a file, those of a server that vLLM has started as well.
    --import takes it only where device, versions and code are the same, and names what differs.
    """
    if imported is not None:
        with bad_input():
            _tell("imported", import_kernels(imported))
    if run is not None:
        _warm_up(run, max_requests, max_seq_len, draft_tokens)
    if exported is not None and not launched().rank:
        with bad_input():
            _tell("exported", export_kernels(exported, target))


def _warm_up(run: RunOptions, max_requests: int, max_seq_len: int, draft_tokens: int) -> None:
    model = run.load("auto" if draft_tokens else "off")
    with bad_input():
        options = run.engine_options(
            max_requests=max_requests, max_seq_len=max_seq_len, draft_tokens=draft_tokens
        )
        engine = Engine(model, options)
    began = time.perf_counter()
    engine.warm_up()
    click.echo(
        f"{time.perf_counter() - began:.1f} s, {engine.store.nbytes / 1e6:.1f} MB of caches, "
        f"{engine.workspace.num_bytes / 1e6:.1f} MB of workspace"
    )


def _tell(done: str, shipped: Shipped) -> None:
    known = f", {shipped.known} of them known" if shipped.known else ""
    marks = f", {shipped.marks} marks of starts" if shipped.marks else ""
    blind = "" if shipped.compared else "; no GPU here to compare with"
    click.echo(
        f"{shipped.kernels} kernels for {shipped.device} {done}, {shipped.nbytes / 1e6:.1f} MB"
        f"{known}{marks}{blind}"
    )
