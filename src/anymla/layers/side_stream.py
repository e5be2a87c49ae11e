"""Further CUDA streams of a device, for work that need not wait for what runs on the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from anymla.ops.streams import stream_lane


class SideStream:
    """Runs what is launched inside ``beside`` next to what is launched after it, until ``join``.

    There are two streams: one whose CTAs go first where not all fit, for what is
    waited for longest, and one for the rest. Forking waits for all earlier work, or for a mark, and
    joining makes later work wait, so that memory freed on either side is not used again too early:
    tensors made before the fork must live until the join. Inside a CUDA graph the streams become
    parallel branches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = torch.cuda.Stream(device, priority=-1)
        # Streams come from a pool and are given out again: one may be what is launched on already.
        self._others = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._forked: set[torch.cuda.Stream] = set()

    @contextlib.contextmanager
    def beside(
        self, *, first: bool = False, after: torch.cuda.Event | None = None
    ) -> Iterator[None]:
        """Launch on another stream.

        Args:
            first: on the one whose CTAs go first.
            after: behind this mark; None: after all that has been launched here so far.
        """
        here = torch.cuda.current_stream(self._device)
        stream = self._first if first else self._others[self._others[0] == here]
        if after is None:
            stream.wait_stream(here)
        else:
            stream.wait_event(after)
        self._forked.add(stream)
        with torch.cuda.stream(stream), stream_lane(1 + first):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The point that the current stream has come to."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        """Let what follows wait for what runs beside, if anything does."""
        for stream in self._forked:  # a graph knows nothing of a stream that has not been forked
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._forked.clear()


class Inline(SideStream):
    """No further streams: everything runs in the order of its launches."""

    def __init__(self) -> None:
        """Nothing to set up."""

    @contextlib.contextmanager
    def beside(
        self, *, first: bool = False, after: torch.cuda.Event | None = None
    ) -> Iterator[None]:
        """Launch as everywhere else."""
        yield

    def mark(self) -> None:
        """All there is has been launched."""

    def join(self) -> None:
        """Nothing to wait for."""


INLINE = Inline()
