"""``python -m lab experts``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from anymla.cli import commands
from anymla.cli.bench_rows import json_option, measure, require_gpu
from anymla.cli.numbers import count

if TYPE_CHECKING:
    from lab.peers.experts import ExpertsPeer

_PEERS = ("marlin", "triton_kernels", "humming", "humming_token")


@commands.command(examples=["python -m lab experts --experts 256 --tokens 1 --tokens 128"])
@json_option
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(["flash", "pro", "flash-41"]),
    default=("flash",),
)
@count("--experts", "count", default=32, least=6)
@count("--tokens", "tokens", multiple=True, help="Repeatable.")
@count("--tensor-parallel", default=1, help="GPUs that share each expert, of which one is timed.")
@click.option("--backend", "backends", multiple=True, help="Beside what is chosen; repeatable.")
@click.option(
    "--block",
    "blocks",
    multiple=True,
    type=click.Choice(["16", "32", "64", "128"]),
    help="W4A8 with blocks of so many pairs, beside what is chosen; repeatable.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice([*_PEERS, "all"]),
    help="Another library beside it; repeatable.",
)
@click.option(
    "--moe-library",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="vLLM's compiled operations of experts, where vLLM itself is not installed.",
)
def experts(
    json_file: Path | None,
    models: tuple[str, ...],
    count: int,
    tokens: tuple[int, ...],
    tensor_parallel: int,
    backends: tuple[str, ...],
    blocks: tuple[str, ...],
    peers: tuple[str, ...],
    moe_library: Path | None,
) -> None:
    """Time grouped MXFP4 experts of DeepSeek-V4's or V4.1's sizes.

    Weights are random and more than the device's cache holds; calls are replayed as a CUDA graph,
    each with other tokens. ``share_of_copy`` is the bytes of the visited experts over the time,
    as a share of the measured copy bandwidth; without options 1 to 4096 tokens. A backend that is
    named is timed on the same inputs, and its ``_distance`` is that of its result from the chosen
    one's, relative to it; so is W4A8 with each size of blocks that is named. Peers are timed on the
    same inputs too, if their results are as near to the reference as their number formats let them
    be; ``_error`` is how near, ``_absent`` why one has no time.
    """
    from lab.cases.moe import TOKENS, cases

    require_gpu()
    libraries = _peers(peers, moe_library)
    measure(
        cases(
            models,
            count,
            tokens or TOKENS,
            backends,
            libraries,
            tensor_parallel,
            map(int, blocks),
        ),
        json_file,
        peers=[peer for peer in libraries if peer.available()],
        hidden=("kernels_us", *(f"{peer.name}_note" for peer in libraries)),
        ceilings=("copy", "product"),
    )


def _peers(names: tuple[str, ...], moe_library: Path | None) -> list[ExpertsPeer]:
    from lab.peers.humming import Humming
    from lab.peers.marlin import Marlin
    from lab.peers.triton_kernels import TritonKernels

    vllm = Marlin(moe_library)
    known = [vllm, TritonKernels(), Humming(vllm), Humming(vllm, channels=0)]
    return [peer for peer in known if "all" in names or peer.name in names]
