"""Speed cases of the GPU kernels, a module a family, and how they are timed.

Each module has ``cases()``, which yields ``Case`` (or the same four things as a tuple).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        label: "operation, sizes".
        setup: makes fresh inputs on torch's default device and returns the call; made several
            times, so that successive calls do not find their inputs in the cache.
        bytes_moved: bytes that the call must read and write.
        flops: floating-point operations that it must do; 0 where bytes are what matters.
        most_us: asked of it, microseconds; None for nothing.
        share: asked of it, share of the device's measured copy bandwidth; None for nothing.
    """

    label: str
    setup: Callable[[], Callable[[], object]]
    bytes_moved: int
    flops: int = 0
    most_us: float | None = None
    share: float | None = None
