"""Launches that are prepared reach the driver as Triton's own do, without a GPU.

Run by ``test_triton_launch.py`` in a process in which kernels are not interpreted.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from anymla.ops import _triton_launch
from anymla.ops._triton_launch import PreparedLaunch, cdiv
from anymla.ops.compile_ahead import compiled_together
from anymla.ops.device import INTERPRETED, TARGETS
from anymla.testing.empty_kernels import empty_kernels
from lab.launches import derived_families, pretended_device

assert not INTERPRETED


@triton.jit(do_not_specialize=["count"])
def add_kernel(x, y, out, count, factor, BLOCK: tl.constexpr, LAST: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, at < count) * factor
    if y is not None:
        total += tl.load(y + at, at < count)
    tl.store(out + at, total, at < count)


class Seen:
    """Launches that CUDA's driver was given, and how many of them Triton looked up."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, list[Any]]] = []
        self.looked_up = 0

    def note(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.launches.append((name, [described(each) for each in arguments]))

    def look_up(self, *args: Any, **kwargs: Any) -> None:
        self.looked_up += 1


def described(value: Any) -> Any:
    """What is compared of an argument: of tensors what they are, of a profiler's nothing."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, tuple | list):
        return [described(each) for each in value]
    if type(value).__name__ in ("LazyDict", "HookChain"):
        return None
    return described(value.base) if hasattr(value, "block_shape") else value


@pytest.fixture
def seen() -> Iterator[Seen]:
    found = Seen()
    add_kernel.device_caches.clear()
    add_kernel.pre_run_hooks[:] = [found.look_up]
    with empty_kernels(found.note):
        yield found
    add_kernel.pre_run_hooks.clear()
    add_kernel.device_caches.clear()


def prepared(**options: Any) -> PreparedLaunch:
    return PreparedLaunch(add_kernel, (cdiv(100, 32),), 100, 0.5, BLOCK=32, **options)


def aligned(count: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.zeros(count + 16, dtype=dtype)
    start = -x.data_ptr() % 16 // x.element_size()
    return x[start : start + count]


def test_the_first_launch_is_tritons_and_later_ones_are_the_same(seen: Seen) -> None:
    launch, x = prepared(num_warps=2), aligned()
    add_kernel[(4,)](x, x, x, 100, 0.5, BLOCK=32, num_warps=2)
    for _ in range(3):
        launch(x, x, x)
    assert seen.looked_up == 2
    assert len(seen.launches) == 4
    assert all(each == seen.launches[0] for each in seen.launches)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x, None, x),
        lambda x: (x, x.double(), x),
        lambda x: (x, x, x[1:]),  # not a multiple of 16 bytes
        lambda x: (x, 7, x),
    ],
    ids=["none", "dtype", "alignment", "number"],
)
def test_other_tensors_are_looked_up_again(seen: Seen, other: Any) -> None:
    launch, x = prepared(), aligned()
    launch(x, x, x)
    arguments = other(x)
    launch(*arguments)
    assert seen.looked_up == 2
    launch(*arguments)
    launch(x, x, x)
    assert seen.looked_up == 2
    assert seen.launches[1] == seen.launches[2]
    assert seen.launches[0] == seen.launches[3]


def test_no_more_is_kept_than_what_is_launched_often(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton_launch, "LAUNCHES", 3)
    launch, x = prepared(), aligned()
    for number in range(10):
        launch(x, number, x)
        assert len(launch._compiled) <= 3


def test_another_device_is_looked_up_again(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, x = prepared(), aligned()
    launch(x, x, x)
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", lambda: 1)
    launch(x, x, x)
    assert seen.looked_up == 2


def test_a_profiler_sees_every_launch(seen: Seen) -> None:
    launch, x, names = prepared(), aligned(), []
    launch(x, x, x)
    hook = lambda metadata: names.append(metadata.data["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x, x, x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen.looked_up == 2
    launch(x, x, x)
    assert seen.looked_up == 2


def test_nothing_is_launched_while_kernels_are_only_compiled(seen: Seen) -> None:
    launch, x = prepared(), aligned()
    launch(x, x, x)
    with compiled_together(1) as compiles:
        assert compiles
        launch(x, x, x)
    assert len(seen.launches) == 1


def test_an_unknown_triton_looks_up_everything(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_launch, "_KNOWN", False)
    launch, x = prepared(), aligned()
    launch(x, x, x)
    launch(x, x, x)
    assert seen.looked_up == 2


@pytest.mark.parametrize("family", derived_families())
def test_operations_launch_again_what_they_launched(family: str) -> None:
    """Every call that is built: through Triton, and then directly, where that is prepared."""
    target = TARGETS["sm_90"]
    seen = Seen()

    calls = importlib.import_module(f"lab.builds.{family}").calls
    with pretended_device(target), empty_kernels(seen.note):
        for label, call in calls(target):
            call()
            first, seen.launches = seen.launches, []
            call()
            assert first == seen.launches, label
            seen.launches = []
