"""Joining the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from anymla.layers.ranks import ALONE, PeerMemory, Ranks

# Largest tensor that ranks add through each other's memory: each sends all of it to all others,
# where a ring moves twice a tensor in all. A rank keeps three of them from every rank.
_PEER_BYTES = 2 << 20


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


def with_peer_memory(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Ranks:
    """The ranks, exchanging small tensors through each other's memory where their devices can.

    To be called by all of them at a time, once they have joined.

    Args:
        ranks: as ``launched`` says.
        device: of this rank.
        dtype: of the tensors that are added, a model's activations.
    """
    if ranks.size == 1 or device.type != "cuda" or torch.version.hip is not None:
        return ranks
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    others = [other for other in range(local) if other != device.index]
    reaches = local == ranks.size and all(
        torch.cuda.can_device_access_peer(device.index, other) for other in others
    )
    if not _all_say(reaches, device):
        return ranks
    try:
        memory = PeerMemory(dtype, device, _PEER_BYTES)
    except RuntimeError:
        memory = None
    return (
        dataclasses.replace(ranks, peers=memory) if _all_say(memory is not None, device) else ranks
    )


def _all_say(yes: bool, device: torch.device) -> bool:
    answers: Tensor = torch.tensor(int(yes), device=device)
    distributed.all_reduce(answers, distributed.ReduceOp.MIN)
    return bool(answers)
