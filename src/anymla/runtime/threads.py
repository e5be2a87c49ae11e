"""The number of CPU threads that pays off for a model's work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig

# Bytes of weights that a thread reads for a token. Below, calls into torch dominate a step, and
# threads of such small calls wait for each other: on two cores with a load of nine, 32 tokens of
# the checkpoint of `anymla make-tiny` (16 MB a token) took 17 s with one thread, 79 to 136 s with
# two. On idle cores, 48 tokens of bfloat16 weights took as long with two threads as with one at 28
# and 55 MiB a token, 2 to 8 % less of the whole command at 149, 14 to 22 % less at 292.
BYTES_A_THREAD = 128 * 2**20


def weights_per_token(directory: str | Path) -> int:
    """Return the bytes of weights that a token touches; only its own of the routed experts.

    Raises:
        ValueError: the directory is no usable checkpoint.
    """
    config = ModelConfig.from_dir(directory, drafts=False)
    checkpoint = Checkpoint.open(directory)
    routed = sum(info.nbytes for name, info in checkpoint.items() if ".experts." in name)
    # A token reads only a few rows of these tables.
    tables = ("embed.weight", "embed.scale")
    rows = sum(info.nbytes for name, info in checkpoint.items() if name.endswith(tables))
    read = checkpoint.nbytes - routed - rows
    return read + routed * config.num_experts_per_tok // config.n_routed_experts


def threads_for(nbytes: int) -> int:
    """Return the threads that reading ``nbytes`` a token pays for: from 1 to torch's own number."""
    return max(1, min(torch.get_num_threads(), nbytes // BYTES_A_THREAD))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the block with ``count`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
