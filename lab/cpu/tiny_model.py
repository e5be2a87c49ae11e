"""Tiny checkpoints and engines that the whole-model measurements share."""

from __future__ import annotations

from pathlib import Path

import torch

from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

RATIOS = (0, 4, 128, 4)


def tiny(directory: Path) -> Path:
    """Write the four-layer checkpoint into a directory and return it."""
    write_tiny_checkpoint(directory, TinyOptions(ratios=RATIOS, weights="bf16"))
    return directory


def load(directory: Path, dtype: torch.dtype) -> Transformer:
    """Load without a progress bar."""
    return load_model(directory, dtype=dtype, progress=False)


def prompt(model: Transformer, length: int) -> tuple[int, ...]:
    """Return the same random token ids every time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (length,), generator=generator)
    return tuple(ids.tolist())


def engine_with(model: Transformer, request: Request, kv_cache: str) -> Engine:
    """Make an engine with one request, which is submitted."""
    engine = Engine.for_requests(model, EngineOptions(kv_cache=kv_cache), [request])
    engine.submit(request)
    return engine
