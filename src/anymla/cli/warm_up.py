"""``anymla warm-up``: compile ahead of time all kernels that serving a checkpoint uses."""

from __future__ import annotations

import time

import click

from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.numbers import count
from anymla.cli.run_options import RunOptions, run_options
from anymla.runtime.engine import Engine


@commands.command(
    examples=["anymla warm-up examples/tiny/checkpoint --max-requests 2 --max-seq-len 512"],
    no_args_is_help=True,
)
@count("--max-requests", default=8)
@count("--max-seq-len", default=4096)
@count("--draft-tokens", default=0, least=0)
@run_options
def command(*, run: RunOptions, max_requests: int, max_seq_len: int, draft_tokens: int) -> None:
    """Run every size of step once, so that Triton's cache holds every kernel.

    TRITON_CACHE_DIR says where; the directory serves all machines with the same GPU architecture
    and the same versions of the packages. Serve with the same options, or smaller ones.
    """
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
