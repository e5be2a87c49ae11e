"""Trace events of what runs on a CUDA device, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]


def traced(run: Callable[[], object]) -> list[Event]:
    """Return the trace events of what ``run`` launches on the current device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def end_of(event: Event) -> float:
    """Return the microsecond at which an event ends."""
    return float(event["ts"]) + float(event["dur"])
