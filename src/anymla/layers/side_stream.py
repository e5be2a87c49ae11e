"""A second queue of a device, for work that need not wait for what runs on the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from anymla.ops.workspace import second_lane


class SideStream:
    """Runs what is launched inside ``beside`` next to what is launched after it, until ``join``.

    Forking waits for all earlier work, and joining makes later work wait, so that memory freed on
    either side is not used again too early: tensors made before the fork must live until the join.
    Inside a CUDA graph the two become parallel branches.

    Attributes:
        apart: work is cut as two queues want it, rather than into the fewest launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.apart = True
        self._forked = False
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the second queue, after all that has been launched so far."""
        self._forked = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), second_lane():
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The point that the second queue has come to."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def reach(self, mark: torch.cuda.Event | None) -> None:
        """Let what follows wait for a point of the second queue; None is behind everybody."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """Let what follows wait for the second queue, if anything has been launched there."""
        if not self._forked:  # a graph knows nothing of a queue that has not been forked from it
            return
        self._forked = False
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Inline(SideStream):
    """No second queue: everything runs in the order of its launches."""

    def __init__(self, *, apart: bool = False) -> None:
        """With ``apart``, the calls are those that two queues would have."""
        self.apart = apart

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launch as everywhere else."""
        yield

    def mark(self) -> None:
        """All there is has been launched."""

    def reach(self, mark: torch.cuda.Event | None) -> None:
        """Nothing to wait for."""

    def join(self) -> None:
        """Nothing to wait for."""


INLINE = Inline()
# What two queues compute, to the bit, on one.
IN_TURN = Inline(apart=True)
