"""Scratch memory for each CUDA stream, and deferred waits for other streams.

Launchers allocate temporary buffers with ``scratch``. Without a workspace this is ``torch.empty``;
inside ``Workspace.active`` it is a slice of one buffer. Everything that an operation took is free
again when it returns, since later launches on a stream run later. So the buffer is as large as the
largest operation needs, and everything on one stream may share it: engines, graphs, layers.
Operations that run at the same time on other streams take from lanes of their own.

An operation may read an argument only in its last launch, while another stream is still writing it.
Its caller then passes the wait to the operation (``deferred_stream_wait``), which raises an
assertion if the operation did not wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

# Alignment of every slice in bytes: that of torch's allocations, which kernels may assume.
_ALIGNMENT = 256
# Number of streams that operations may run on at the same time.
STREAM_LANES = 3


@dataclasses.dataclass
class _Lane:
    """One stream's part of a workspace; ``used`` and ``needed`` are bytes."""

    buffer: Tensor
    used: int = 0
    needed: int = 0


class Workspace:
    """Scratch memory on one device, divided into one lane for each stream.

    Attributes:
        device: device that the memory is on.
        overflows: number of requests that did not fit and were allocated separately.
    """

    def __init__(self, device: torch.device | str, num_bytes: int = 0) -> None:
        """Allocate the workspace.

        Args:
            device: device to allocate on.
            num_bytes: bytes for operations on the main stream; ``reserve`` grows every lane.
        """
        self.device = torch.device(device)
        self.overflows = 0
        sizes = (num_bytes, *(0 for _ in range(1, STREAM_LANES)))
        self._lanes = [_Lane(self._allocate(size)) for size in sizes]
        self._outgrown: list[Tensor] = []

    @classmethod
    def over(cls, buffer: Tensor) -> Workspace:
        """Make a workspace of a given uint8 buffer, for operations on the main stream."""
        made = cls.__new__(cls)
        made.device, made.overflows, made._outgrown = buffer.device, 0, []
        made._lanes = [_Lane(buffer), *(_Lane(buffer[:0]) for _ in range(1, STREAM_LANES))]
        return made

    @property
    def num_bytes(self) -> int:
        """Reserved bytes over all lanes, including outgrown buffers."""
        buffers = [*(lane.buffer for lane in self._lanes), *self._outgrown]
        return sum(buffer.numel() for buffer in buffers)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the largest operations so far needed at once, summed over all lanes."""
        return sum(lane.needed for lane in self._lanes)

    def reserve(self) -> None:
        """Grow every lane to what has been needed so far.

        Call it after a rehearsal of the largest operations and before graphs are recorded, since
        graphs keep the memory's addresses. Buffers that earlier graphs use stay allocated.
        """
        for lane in self._lanes:
            assert not lane.used, "an operation is running"
            if lane.needed > lane.buffer.numel():
                if lane.buffer.numel():
                    self._outgrown.append(lane.buffer)
                lane.buffer = self._allocate(lane.needed)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let operations inside the context take their scratch memory from this workspace."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that is valid until the running operation returns."""
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
        """Free everything that was taken inside the context when it ends."""
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
    """Return the workspace that operations use now; None if there is none."""
    return _active.get()


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory that a launcher uses and does not return."""
    workspace = _active.get()
    if workspace is None or workspace.device != device:
        return torch.empty(shape, dtype=dtype, device=device)
    return workspace.take(shape, dtype)


@contextlib.contextmanager
def scratch_scope() -> Iterator[None]:
    """Free ``scratch`` memory at the context's end, for functions that call several operations."""
    workspace = _active.get()
    if workspace is None:
        yield
        return
    with workspace.scope():
        yield


@contextlib.contextmanager
def stream_lane(number: int) -> Iterator[None]:
    """Run operations inside on lane 1 or 2, a stream whose scratch memory is its own."""
    assert 0 < number < STREAM_LANES
    token = _lane.set(number)
    try:
        yield
    finally:
        _lane.reset(token)


_wait: ContextVar[Callable[[], None] | None] = ContextVar("wait", default=None)


@contextlib.contextmanager
def deferred_stream_wait(wait: Callable[[], None]) -> Iterator[None]:
    """Pass a wait to the operation called inside, which waits before it reads late arguments.

    Only for operations that call ``flush_stream_wait``.

    Args:
        wait: function that makes later launches wait for the other stream.
    """
    token = _wait.set(wait)
    try:
        yield
        assert _wait.get() is None, "the operation has not waited for its arguments"
    finally:
        _wait.reset(token)


def flush_stream_wait() -> None:
    """Wait, if a wait was deferred, before the first launch that reads another stream's results."""
    wait = _wait.get()
    if wait is not None:
        _wait.set(None)
        wait()


def has_deferred_wait() -> bool:
    """Return True if another stream may still be writing an argument of this operation."""
    return _wait.get() is not None
