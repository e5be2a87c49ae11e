"""Values that the layers of a step share, computed by the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from vllm.forward_context import get_forward_context


def once(name: Hashable, make: Callable[[], Any], *, of: Any = None) -> Any:
    """Return the value that the first layer of a forward pass has made under that name.

    Args:
        name: key of the value.
        make: function that creates it, called by the first layer.
        of: object that the value is made from; another object makes a new value.
    """
    held: dict[Hashable, Any] = get_forward_context().additional_kwargs.setdefault("anymla", {})
    found = held.get(name)
    if found is None or found[0] is not of:
        found = held[name] = of, make()
    return found[1]
