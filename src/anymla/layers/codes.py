"""Quantised activations, passed beside their rows from their producer to a product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.formats.quantized_rows import QuantizedRows


def supports_prequantized(weight: Tensor) -> bool:
    """True if kernels can write quantised outputs and read quantised inputs, which saves a launch.

    On a CPU every product quantises its own input.
    """
    return not weight.is_cpu


def allocate(wanted: bool, x: Tensor) -> QuantizedRows | None:
    """Allocate the quantised form of activations like x [T, ..., K]; None if it is not wanted."""
    return QuantizedRows.empty(len(x), x.shape[-1], x.device) if wanted else None


def as_kwargs(quantised: QuantizedRows | None) -> dict[str, Any]:
    """Return the keyword arguments by which operations write or read the quantised rows."""
    if quantised is None:
        return {}
    return {"codes": quantised.codes, "code_scales": quantised.scales}
