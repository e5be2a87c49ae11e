"""Base of an adapter that watches an engine: its faults are contained, and its cases sent away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from anymla.audit.auditor import Auditor
from anymla.audit.packet import Packed, Packet
from anymla.audit.rows import RowRecorder


class Watcher:
    """Base of an adapter that watches a model.

    Attributes:
        auditor: auditor that gets the cases.
        device: device of the model.
    """

    def __init__(self, auditor: Auditor, device: torch.device) -> None:
        """Keep both."""
        self.auditor, self.device = auditor, device
        self._side: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Count and log a fault of the audit itself; the engine goes on."""
        try:
            yield
        except Exception:
            self.auditor.skipped += 1
            self.auditor.log.exception("audit: %s could not be looked at", what)

    def submit(self, packet: Packet, recorder: RowRecorder) -> None:
        """Have a step's cases judged; the engine waits for nothing."""
        planned, marks = packet.planned, recorder.hold_marks(packet)
        block = packet.block(self.device)
        if self.device.type != "cuda":
            self.auditor.submit_step(lambda: Packed(planned, block, marks=marks))
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
            host.copy_(block, non_blocking=True)
            arrived.record()
        block.record_stream(self._side)  # no step that waits for its judge keeps it

        def fetched() -> Packed:
            arrived.synchronize()
            return Packed(planned, host, marks=marks)

        self.auditor.submit_step(fetched)
