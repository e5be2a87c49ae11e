"""Tensors with storages of their own at chosen places in a large piece of memory.

A kernel that is given one tensor and reaches others by their distances must do so at any distance.
Allocators put tensors of a test near each other; here their addresses are chosen.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

GIB = 1 << 30


class _Bytes:
    """Bytes of a CUDA tensor, in the interface by which libraries share arrays."""

    def __init__(self, memory: Tensor, start: int, count: int) -> None:
        self._memory = memory  # keeps it alive
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (memory.data_ptr() + start, False),
            "version": 3,
        }


def large_memory(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size]; on a CPU no page of it takes memory before it is touched.

    Raises:
        MemoryError: the device has too little free memory.
        NotImplementedError: places cannot be chosen on the device.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    if device.type != "cuda":
        raise NotImplementedError(f"addresses of tensors cannot be chosen on {device.type}")
    free, _ = torch.cuda.mem_get_info(device)
    if free < size:
        raise MemoryError(f"needs {size / GIB:.1f} GiB, of which {free / GIB:.1f} are free")
    return torch.empty(size, dtype=torch.uint8, device=device)


def tensor_at(memory: Tensor, place: int, like: Tensor) -> Tensor:
    """Return a copy of a tensor at a place of the memory, with a storage of its own.

    Args:
        memory: result of ``large_memory``, which must outlive the copy.
        place: offset in bytes.
        like: values of the copy, on any device.
    """
    if memory.is_cuda:
        there = torch.as_tensor(_Bytes(memory, place, like.nbytes), device=memory.device)
    else:
        own = (ctypes.c_uint8 * like.nbytes).from_address(memory.data_ptr() + place)
        there = torch.frombuffer(own, dtype=torch.uint8)
    return there.view(like.dtype).view(like.shape).copy_(like)
