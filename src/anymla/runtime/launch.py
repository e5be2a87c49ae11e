"""Start-up and shutdown of the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from anymla.layers.ranks import ALONE, PeerMemory, Ranks

# Largest tensor, in bytes, that ranks add through each other's memory. Each rank sends the whole
# tensor to all others, where a ring sends twice its size in total. A rank keeps three such tensors
# from every rank.
_PEER_BYTES = 2 << 20


def launched() -> Ranks:
    """Return this process's ranks as torchrun started it; a single rank without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Ranks(int(os.environ.get("RANK", "0")), size) if size > 1 else ALONE


def local_device(device: str) -> torch.device:
    """Return this process's device: with several processes, one of the machine's devices each."""
    if device == "cpu" or launched().size == 1:
        return torch.device(device)
    return torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes, and leave them at the end; do nothing for a single rank.

    No engine with recorded graphs may outlive the block.

    Args:
        device: device of this process; NCCL serves CUDA devices, gloo the CPU.
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
        # for that. Recorded steps are in reference cycles, so they have to be collected.
        gc.collect()
        distributed.destroy_process_group()


def with_peer_memory(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Ranks:
    """Let ranks exchange small tensors through each other's memory where their devices can.

    All ranks must call it together, once they have joined.

    Args:
        ranks: ranks as ``launched`` returns them.
        device: device of this rank.
        dtype: dtype of the tensors that are added, a model's activations.
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
