"""Named cases of ``anymla bench run``, in one module per family.

Each module has ``cases()``, which yields a ``TimedCall`` for each single operation, or cases of the
runner where more than one call is to be timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.ops.device import INTERPRETED

# Largest number of tokens of a step that is timed as decoding.
DECODING = 64


@functools.cache
def backend() -> str | None:
    """Return the portable backend if there is a GPU, or None to let operations choose on a CPU."""
    return "triton" if INTERPRETED or torch.accelerator.is_available() else None


def normal(*size: int) -> Tensor:
    """Bfloat16 activations of a normal distribution, on torch's default device."""
    return torch.randn(size, dtype=torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """One call to time.

    Attributes:
        label: text "operation, sizes" for people.
        setup: function that makes fresh inputs on torch's default device and returns the call. It
            is run several times, so that successive calls do not find their inputs in the cache.
        bytes_moved: bytes that the call must read and write.
        flops: floating-point operations that the call must do; 0 if it is limited by bytes.
        beside_copy: True to time a copy of as many bytes as well, as the limit of bandwidth.
    """

    label: str
    setup: Callable[[], Callable[[], object]]
    bytes_moved: int
    flops: int = 0
    beside_copy: bool = False


def step_call(
    label: str, setup: Callable[[], Callable[[], object]], bytes_moved: int, tokens: int
) -> TimedCall:
    """Make a call of a step of ``tokens`` tokens, beside a copy if the step does not decode."""
    return TimedCall(label, setup, bytes_moved, beside_copy=tokens > DECODING)
