"""Bridge that runs tests written for CPU tensors on a GPU, with the same bytes.

While installed, a call that names the Triton backend has the storages of its tensor arguments
copied to the GPU whole (strides, offsets, canaries and padding included), runs there, and has them
copied back. So every test of a Triton backend, and every conformance case, proves the compiled
kernel as it proves the interpreted one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from anymla.ops import device as device_facts
from anymla.ops.registry import Operation, Support

_NAMED = "triton"
_T = TypeVar("_T")


def admit_cpu_tensors(target: str | None = None) -> None:
    """Let backends of Triton's kernels take CPU tensors when they are named.

    Args:
        target: name of the target whose tiles are chosen on the CPU from then on; None for the
            CPU's own.
    """
    supported = device_facts._support

    def support(device_type: str) -> Support:
        if device_type == "cpu" and device_facts.has_triton():
            return Support(True, automatic=False)
        return supported(device_type)

    # The cached support of a device must still be resettable.
    support.cache_clear = supported.cache_clear  # type: ignore[attr-defined]
    device_facts._support = support  # type: ignore[assignment]
    if target is not None:
        device_facts.CPU = device_facts.TARGETS[target]
        device_facts.target_of.cache_clear()


@functools.cache
def install() -> None:
    """Bridge all operations of this process; further calls do nothing.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the device bridge needs a CUDA device")
    admit_cpu_tensors()
    call = Operation.__call__

    def bridged(
        self: Operation[..., Any], *args: Any, backend: str | None = None, **kwargs: Any
    ) -> Any:
        tensors = _tensors((args, tuple(kwargs.values())))
        if backend != _NAMED or any(tensor.is_cuda for tensor in tensors):
            return call(self, *args, backend=backend, **kwargs)
        # The contract checks the tensors that it was given first.
        self._contract(*args, **kwargs)
        run = functools.partial(call, self, backend=backend)
        return _Bridge(torch.device("cuda")).run(run, args, kwargs)

    Operation.__call__ = bridged  # type: ignore[assignment,method-assign]


def on_device(call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap a call for CPU tensors to run on a device, on copies of their storages."""

    @functools.wraps(call, assigned=())
    def bridged(*args: Any, **kwargs: Any) -> Any:
        if any(not tensor.is_cpu for tensor in _tensors((args, tuple(kwargs.values())))):
            return call(*args, **kwargs)
        return _Bridge(device).run(call, args, kwargs)

    return bridged


def to_device(value: _T, device: torch.device) -> _T:
    """Copy tensors to a device with the same strides, offsets, and surrounding storages.

    Args:
        value: a tensor, or lists and tuples of tensors and of values that stay as they are.
        device: device of the copies.
    """
    moved: _T = _Bridge(device)._moved(value)
    return moved


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


class _Bridge:
    """Storages of one call on both devices."""

    def __init__(self, device: torch.device) -> None:
        self._on = device
        self._host: dict[int, Tensor] = {}
        self._device: dict[int, Tensor] = {}
        self._returned: dict[tuple[Any, ...], Tensor] = {}

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Move the arguments, call, and move the results back."""
        result = call(
            *[self._moved(value) for value in args],
            **{name: self._moved(value) for name, value in kwargs.items()},
        )
        getattr(torch, self._on.type).synchronize()
        for key, bytes_on_device in self._device.items():
            self._host[key].copy_(bytes_on_device)
        return self._back(result)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            members = [self._moved(each) for each in value]
            return value._make(members) if hasattr(value, "_make") else type(value)(members)
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in self._device:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._host[key], self._device[key] = whole, whole.to(self._on)
        moved = torch.empty(0, dtype=value.dtype, device=self._on).set_(
            self._device[key].untyped_storage(),
            value.storage_offset(),
            value.size(),
            value.stride(),
        )
        self._returned[self._place(moved)] = value
        return moved

    def _back(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._back(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        # A result that is an argument must be that same object.
        given = self._returned.get(self._place(value))
        return value.cpu() if given is None else given

    @staticmethod
    def _place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
