"""Conversion of the command line's words to the subject of the cases."""

from __future__ import annotations

import torch

from anymla.ops.registry import BackendUnavailable
from anymla.runtime.devices import default_device
from anymla.testing.conformance.adapters import load_adapter
from anymla.testing.conformance.ops import all_backends
from anymla.testing.conformance.runner import Subject


def subject_of(backend: str | None, against: str | None, device: str | None) -> Subject:
    """Find the subject that the words name.

    Args:
        backend: name of a backend, or None for the best of each operation.
        against: name of another library (``adapters.load_adapter``), or None.
        device: name of the calls' device; None for the accelerator if there is one.

    Raises:
        BackendUnavailable: the library, or the device that it needs, is not available.
        ValueError: a name is unknown.
    """
    place = torch.device(device or default_device())
    if place.type != "cpu" and not getattr(torch, place.type).is_available():
        raise BackendUnavailable(f"--device {place}: torch sees none on this machine")
    if against is None:
        if backend is not None and backend not in all_backends():
            raise ValueError(f"--backend {backend}: there are {', '.join(all_backends())}")
        return Subject(backend, None, place)
    adapter = load_adapter(against)
    if adapter.needs_gpu and place.type == "cpu":
        raise BackendUnavailable(f"{adapter.name} runs on CUDA tensors, and torch sees no GPU here")
    return Subject(backend, adapter, place)
