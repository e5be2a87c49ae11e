"""Scratch memory by CUDA stream, and waits on another stream that an operation defers.

Kernels' launchers ask ``scratch`` for it. Without a workspace that is ``torch.empty``; inside
``Workspace.active`` it is a part of one buffer. All that a call has taken is free again when it
returns, because what is launched later runs later; so the buffer is as large as the hungriest call,
and may be shared by everything that launches on one stream: engines, graphs, layers. What runs on
further streams at the same time takes from a lane of its own.

An argument may still be in the making on another stream when an operation is called that reads it
only in its last launch. The caller leaves the waiting to the operation (``deferred_stream_wait``),
and finds out if it forgot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

# Every part begins at a multiple: what kernels may assume of torch's allocations, and a line.
_ALIGNMENT = 256
# Streams that operations may run on at a time.
STREAM_LANES = 3


@dataclasses.dataclass
class _Lane:
    """The part of a workspace that one stream uses; offsets in bytes."""

    buffer: Tensor
    used: int = 0
    needed: int = 0


class Workspace:
    """Scratch memory of one device.

    Attributes:
        device: where it is.
        overflows: how often something did not fit and was allocated instead.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 0) -> None:
        """Allocate.

        Args:
            device: where.
            num_bytes: for operations on the main stream; see ``reserve``.
        """
        self.device = torch.device(device)
        self.overflows = 0
        sizes = (num_bytes, *(0 for _ in range(1, STREAM_LANES)))
        self._lanes = [_Lane(self._allocate(size)) for size in sizes]
        self._outgrown: list[Tensor] = []

    @classmethod
    def over(cls, buffer: Tensor) -> Workspace:
        """Of memory that somebody else reserved (uint8), for operations on the main stream."""
        made = cls.__new__(cls)
        made.device, made.overflows, made._outgrown = buffer.device, 0, []
        made._lanes = [_Lane(buffer), *(_Lane(buffer[:0]) for _ in range(1, STREAM_LANES))]
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        buffers = [*(lane.buffer for lane in self._lanes), *self._outgrown]
        return sum(buffer.numel() for buffer in buffers)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the hungriest calls so far would have had to find, of every stream."""
        return sum(lane.needed for lane in self._lanes)

    def reserve(self) -> None:
        """Grow to what has been needed so far.

        To be called between a rehearsal of the largest calls and the recording of graphs, which
        know the memory by its address: what earlier graphs know stays theirs.
        """
        for lane in self._lanes:
            assert not lane.used, "an operation is running"
            if lane.needed > lane.buffer.numel():
                if lane.buffer.numel():
                    self._outgrown.append(lane.buffer)
                lane.buffer = self._allocate(lane.needed)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Operations that are called inside take their scratch memory from here."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is good until the operation returns; its values are anything."""
        lane = self._lanes[_lane.get()]
        size = math.prod(shape) * dtype.itemsize
        start = lane.used
        lane.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        lane.needed = max(lane.needed, lane.used)
        if lane.used > lane.buffer.numel():
            self.overflows += 1
            return torch.empty(shape, dtype=dtype, device=self.device)
        return lane.buffer[start : start + size].view(dtype).view(shape)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is taken inside is given back at the end."""
        lane = self._lanes[_lane.get()]
        used = lane.used
        try:
            yield
        finally:
            lane.used = used

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


_active: ContextVar[Workspace | None] = ContextVar("workspace", default=None)
_lane: ContextVar[int] = ContextVar("lane", default=0)


def active_workspace() -> Workspace | None:
    """The workspace that operations use now."""
    return _active.get()


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for a launcher that returns none of it."""
    workspace = _active.get()
    if workspace is None or workspace.device != device:
        return torch.empty(shape, dtype=dtype, device=device)
    return workspace.take(shape, dtype)


@contextlib.contextmanager
def scratch_scope() -> Iterator[None]:
    """For callers of several operations: what ``scratch`` gives inside is free at the end."""
    workspace = _active.get()
    if workspace is None:
        yield
        return
    with workspace.scope():
        yield


@contextlib.contextmanager
def stream_lane(number: int) -> Iterator[None]:
    """Operations inside run on another stream, 1 or 2, and share nothing with those outside."""
    assert 0 < number < STREAM_LANES
    token = _lane.set(number)
    try:
        yield
    finally:
        _lane.reset(token)


_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextlib.contextmanager
def deferred_stream_wait(wait: Callable[[], None]) -> Iterator[None]:
    """An operation that is called inside waits before it reads; for those that know how.

    Args:
        wait: lets what is launched afterwards wait.
    """
    token = _wait.set(wait)
    try:
        yield
        assert _wait.get() is None, "the operation has not waited for its arguments"
    finally:
        _wait.reset(token)


def flush_stream_wait() -> None:
    """Before the first launch that reads what may come from another stream; again does nothing."""
    wait = _wait.get()
    if wait is not None:
        _wait.set(None)
        wait()


def has_deferred_wait() -> bool:
    """Whether something may still be in the making on another stream."""
    return _wait.get() is not None
