"""What the layers of a step share, made by the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from vllm.forward_context import get_forward_context


def once(name: Hashable, make: Callable[[], Any], *, of: Any = None) -> Any:
    """What the first layer of a forward pass has made under that name.

    Args:
        name: of it.
        make: called by the first.
        of: an object that it is made of; it is made again of another.
    """
    held: dict[Hashable, Any] = get_forward_context().additional_kwargs.setdefault("anymla", {})
    found = held.get(name)
    if found is None or found[0] is not of:
        found = held[name] = of, make()
    return found[1]
