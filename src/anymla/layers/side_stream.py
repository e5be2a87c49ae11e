"""Further CUDA streams of a device, for work that can run in parallel with the first stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from anymla.ops.streams import stream_lane


class SideStream:
    """Runs launches inside ``beside`` in parallel with later launches, until ``join``.

    There are two streams: one with priority for its CTAs, for work on the longest path, and one for
    the rest. A fork waits for all earlier work, or for a mark, and a join makes later work wait, so
    that memory freed on either side is not reused too early. Tensors made before the fork must live
    until the join. Inside a CUDA graph the streams become parallel branches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = torch.cuda.Stream(device, priority=-1)
        # Streams come from a pool and are reused: one of them may be the current stream.
        self._others = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._forked: set[torch.cuda.Stream] = set()

    @contextlib.contextmanager
    def beside(
        self, *, first: bool = False, after: torch.cuda.Event | None = None
    ) -> Iterator[None]:
        """Launch the block's work on another stream.

        Args:
            first: True for the stream with priority for its CTAs.
            after: mark to wait for; None to wait for all launches on this stream so far.
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
        """Return a mark of the current stream's position."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        """Make later work wait for the parallel work, if there is any."""
        for stream in self._forked:  # a graph does not know streams that have not been forked
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._forked.clear()


class Inline(SideStream):
    """No further streams: everything runs in the order of its launches."""

    def __init__(self) -> None:
        """Set up nothing."""

    @contextlib.contextmanager
    def beside(
        self, *, first: bool = False, after: torch.cuda.Event | None = None
    ) -> Iterator[None]:
        """Launch on the current stream."""
        yield

    def mark(self) -> None:
        """Return no mark, because all work is in order."""

    def join(self) -> None:
        """Do nothing, because no work runs in parallel."""


INLINE = Inline()
