"""Activations that are passed quantised, beside their rows, from who makes them to a product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.formats.quantized_rows import QuantizedRows


def supports_prequantized(weight: Tensor) -> bool:
    """Whether a launch can be saved: kernels quantise what they make, and read what is quantised.

    On a CPU every product quantises what it reads.
    """
    return not weight.is_cpu


def allocate(wanted: bool, x: Tensor) -> QuantizedRows | None:
    """Memory for activations like x [T, ..., K] in quantised form, or None if it is not wanted."""
    return QuantizedRows.empty(len(x), x.shape[-1], x.device) if wanted else None


def as_kwargs(quantised: QuantizedRows | None) -> dict[str, Any]:
    """The arguments by which operations fill them, or read them."""
    if quantised is None:
        return {}
    return {"codes": quantised.codes, "code_scales": quantised.scales}
