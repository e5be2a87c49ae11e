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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the second queue, after all that has been launched so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), second_lane():
            yield

    def join(self) -> None:
        """Let what follows wait for the second queue."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Inline(SideStream):
    """No second queue: everything runs in the order of its launches."""

    def __init__(self) -> None:
        pass

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launch as everywhere else."""
        yield

    def join(self) -> None:
        """Nothing to wait for."""


INLINE = Inline()
