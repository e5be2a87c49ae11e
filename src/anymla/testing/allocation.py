"""Measurement of the largest tensor that an operation allocates."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LargestAllocation(TorchDispatchMode):
    """Context manager that notes the largest storage of any tensor made inside.

    Views share their base's storage and cost nothing; what a kernel allocates for itself is not
    seen.

    Attributes:
        num_bytes: bytes of the largest storage so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and measure its results."""
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_iter((args, kwargs or {}))
            if isinstance(each, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage.data_ptr() not in given:
                    self.num_bytes = max(self.num_bytes, storage.nbytes())
        return result
