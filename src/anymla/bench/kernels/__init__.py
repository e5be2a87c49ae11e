"""Named cases of ``anymla bench run``, a module a family.

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
    """The portable kernels where there is a GPU; on a CPU what operations choose there."""
    return "triton" if INTERPRETED or torch.accelerator.is_available() else None


def normal(*size: int) -> Tensor:
    """Bfloat16 activations of a normal distribution, on torch's default device."""
    return torch.randn(size, dtype=torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """One call to time.

    Attributes:
        label: text "operation, sizes" for people.
        setup: makes fresh inputs on torch's default device and returns the call; made several
            times, so that successive calls do not find their inputs in the cache.
        bytes_moved: bytes that the call must read and write.
        flops: floating-point operations that it must do; 0 where bytes are what matters.
        beside_copy: a copy that moves as many bytes is timed as well: bandwidth is its limit.
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
