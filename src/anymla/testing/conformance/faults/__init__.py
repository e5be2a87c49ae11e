"""Deliberate faults in the operations, and around them, which the cases must detect."""

from __future__ import annotations

import importlib

from anymla.testing.conformance.faults.fault import FAULTS, Fault

_MODULES = (
    "attention",
    "training",
    "training_blocks",
    "cache",
    "records",
    "rope",
    "compressor",
    "indexer",
    "streams",
    "projections",
    "v41",
    "inside",
)


def load_faults() -> list[Fault]:
    """Return all faults, in the order of the modules."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return FAULTS
