"""One call of an operation, its inputs, and the float64 oracle's opinion of what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.ops.registry import Operation


@dataclasses.dataclass(frozen=True)
class Trial:
    """A call that is checked, or timed.

    Attributes:
        operation: what is called.
        args: its arguments.
        kwargs: its keywords.
        bytes_moved: bytes that the call must read and write.
        verify: looks at what the call returned, and at what it wrote; returns the largest error
            as a share of what is allowed (None where it only knows that bytes fit the oracle's
            interval), and raises AssertionError beyond.
        flops: floating-point operations that it must do; 0 where bytes are what matters.
    """

    operation: Operation[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bytes_moved: int
    verify: Callable[[Any], float | None]
    flops: int = 0

    def run(self) -> Any:
        """Call the backend that the operation picks by itself."""
        return self.operation(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A kind of call.

    Attributes:
        family: of the operation.
        label: what is called, in a few words.
        draw: makes a trial of so many tokens on a device.
        tokens: by "check", "cpu" and "gpu": for the oracle, and for the clock.
        fp8: its data are FP8 codes, which not every device converts by an instruction.
    """

    family: str
    label: str
    draw: Callable[[int, torch.device], Trial]
    tokens: dict[str, int]
    fp8: bool = False


def host(tensor: Tensor) -> Tensor:
    """A CPU copy, dense."""
    return tensor.detach().cpu()
