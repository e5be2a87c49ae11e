"""The small model of the cases that run a whole one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from anymla.model.load import load_model
from anymla.testing.conformance.ops import Ops
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


@contextlib.contextmanager
def tiny_model(ops: Ops, options: TinyOptions) -> Iterator[tuple[Any, str]]:
    """Write a small checkpoint, and yield its model in float32 and the checkpoint's directory."""
    with tempfile.TemporaryDirectory() as directory, ops.as_backend() as backend:
        write_tiny_checkpoint(directory, options)
        place = ops.device or torch.device("cpu")
        model = load_model(
            directory, dtype=torch.float32, device=place, backend=backend, progress=False
        )
        yield model, directory
