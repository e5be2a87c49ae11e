"""Tensors between pages that nobody may touch: what reads or writes beside one ends the process."""

import contextlib
import ctypes
import mmap
from unittest import mock

import torch

_PAGE = mmap.PAGESIZE
# Kernels are compiled for pointers that are multiples of this.
_ALIGNMENT = 16
_NO_ACCESS = 0
_EMPTY = (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")


def guarded(tensor, *, behind):
    """A copy with the same strides, right before a forbidden page, or right behind one.

    Args:
        tensor: any, on the CPU.
        behind: right behind the page; otherwise before it, up to 15 bytes away.
    """
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    count = (reach + 1) * tensor.element_size() if tensor.numel() else 0
    inside = max(1, -(-count // _PAGE)) * _PAGE
    memory = mmap.mmap(-1, inside + 2 * _PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    for page in (0, inside + _PAGE):
        _forbid(whole.data_ptr() + page)
    first = _PAGE if behind else (inside + _PAGE - count) // _ALIGNMENT * _ALIGNMENT
    copy = whole[first : first + count].view(tensor.dtype)
    copy = copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset())
    return copy.copy_(tensor)


@contextlib.contextmanager
def guarded_empty(*, behind):
    """What torch's empty functions give meanwhile is guarded."""

    def made_by(function):
        return lambda *args, **named: guarded(function(*args, **named), behind=behind)

    with contextlib.ExitStack() as stack:
        for owner, name in _EMPTY:
            stack.enter_context(mock.patch.object(owner, name, made_by(getattr(owner, name))))
        yield


def _forbid(page):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
