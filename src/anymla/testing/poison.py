"""Poison for memory that nothing has written.

``torch.empty`` usually returns zeros on a fresh process, so code that forgets to write an element
passes its tests. Inside ``poisoned_empty()`` every allocation that the package makes without a
value is filled with one that shows: NaN for floats, 0xFF bytes for uint8, a large number for wider
integers (0xFF bytes would be -1 there, which the package's index tensors use for "nothing").
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The compiler lists torch's functions when it is first imported, and traces no others. It must see
# them before they are replaced.
import torch._dynamo
from torch import Tensor

PACKAGE = "anymla"
_INTEGER_POISON = 0x5A
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def poison_(tensor: Tensor) -> Tensor:
    """Fill a tensor in place with its dtype's poison and return it.

    Floats (all widths) become NaN, uint8 and int8 0xFF, bool True, wider integers 0x5A5A....
    """
    dtype = tensor.dtype
    if dtype is torch.bool:
        return tensor.fill_(True)
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return tensor.fill_(torch.nan)
    if dtype.is_floating_point:  # 8-bit floats: 0xFF is NaN in e4m3fn, e5m2 and e8m0fnu
        code = 0x80 if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) else 0xFF
        tensor.view(torch.uint8).fill_(code)
        return tensor
    if dtype is torch.uint8:
        return tensor.fill_(0xFF)
    if dtype is torch.int8:
        return tensor.fill_(-1)
    return tensor.fill_(int.from_bytes(bytes([_INTEGER_POISON]) * dtype.itemsize, "little"))


@contextlib.contextmanager
def poisoned_empty(package: str = PACKAGE) -> Iterator[None]:
    """Poison results of torch's empty functions in modules of ``package``, while active.

    Calls from other modules, and calls traced by torch.compile, are left alone.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name in _FUNCTIONS]
    try:
        for owner, name, original in originals:
            setattr(owner, name, _poisoning(original, package))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _poisoning(original: Callable[..., Tensor], package: str) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller == package or caller.startswith(package + "."):
            with torch.no_grad():
                poison_(result)
        return result

    return empty
