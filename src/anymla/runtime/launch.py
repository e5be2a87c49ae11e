"""Joining the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch
from torch import distributed

from anymla.layers.ranks import ALONE, Ranks


def launched() -> Ranks:
    """This process among those that torchrun started; alone without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Ranks(int(os.environ.get("RANK", "0")), size) if size > 1 else ALONE


def local_device(device: str) -> torch.device:
    """The device of this process: its own of the machine's, if there are several processes."""
    if device == "cpu" or launched().size == 1:
        return torch.device(device)
    return torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes, and leave them at the end; nothing to do when alone.

    Nothing may keep an engine with recorded graphs beyond that.

    Args:
        device: of this process; NCCL serves CUDA devices, gloo the CPU.
    """
    ranks = launched()
    if ranks.size == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo"),
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield ranks
    finally:
        # NCCL's communicator lives until the last graph that calls it is gone, and leaving waits
        # for that; recorded steps and what they run refer to each other.
        gc.collect()
        distributed.destroy_process_group()
