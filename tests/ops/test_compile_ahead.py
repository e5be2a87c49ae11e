"""Processes that launch the same kernels share out their compiling."""

import inspect
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from anymla.ops import compile_ahead
from anymla.ops.compile_ahead import _cores, _in_turn

pytest.importorskip("triton")
KEYS = tuple(f"kernel {n}" for n in range(40))


def submit(
    mode: Any, key: str, compile_kernel: Callable[[], Any], kept: Callable[[Any], Any]
) -> Any:
    """As Triton does; from 3.9 on it also says what is to be undone where compiling fails."""
    undone = [lambda _: None] * (len(inspect.signature(type(mode).__base__.submit).parameters) - 4)
    return mode.submit(key, compile_kernel, kept, *undone)


def compiled(rank: int, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The order in which a process compiles, one at a time, and what it then has."""
    order: list[str] = []
    noted: list[str] = []
    kernels: dict[str, str] = {}

    def asked(mode: Any, key: str) -> Any:
        return submit(
            mode,
            key,
            lambda: order.append(key) or f"code of {key}",
            lambda code: kernels.update({key: code}),
        )

    with ThreadPoolExecutor(1) as pool, _in_turn(pool, rank, ranks, noted.append) as mode:
        for key in KEYS:
            assert asked(mode, key) is asked(mode, key)
    assert noted == [f"code of {key}" for key in order]
    return order, kernels


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_begins_with_its_own_and_has_all(ranks: int) -> None:
    orders = []
    for rank in range(ranks):
        order, kernels = compiled(rank, ranks)
        assert kernels == {key: f"code of {key}" for key in KEYS}
        assert sorted(order) == sorted(KEYS)
        orders.append(order)
    # Each begins where the one before it goes on.
    starts = [orders[0].index(order[0]) for order in orders]
    assert starts == sorted(set(starts))
    assert orders == [orders[0][start:] + orders[0][:start] for start in starts]


@pytest.mark.parametrize("rank", range(2))
def test_what_is_asked_for_before_its_turn_is_compiled_then(rank: int) -> None:
    order: list[str] = []
    with ThreadPoolExecutor(1) as pool, _in_turn(pool, rank, 2, print) as mode:
        kernel = submit(mode, "kernel", lambda: order.append("kernel") or "code", order.append)
        assert kernel.result() == "code"
        assert order[:2] == ["kernel", "code"]


def test_a_kernel_that_does_not_compile_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("no such instruction")

    for rank in range(2):
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(RuntimeError, match="no such instruction"),
            _in_turn(pool, rank, 2, print) as mode,
        ):
            submit(mode, "kernel", fails, lambda _: None)


def test_triton_builds_launchers_up_to_3_6() -> None:
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert compile_ahead.builds_launchers() == (release < (3, 7))


def test_a_launcher_is_built_once_for_each_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be built is left to the launch, which raises."""
    from triton.runtime import driver

    built: list[Any] = []

    def launcher(source: Any, metadata: Any) -> None:
        built.append(source.signature)
        raise RuntimeError("no compiler")

    def kernel(*types_of: str, descriptors: Any = None) -> Any:
        source = types.SimpleNamespace(signature=dict(enumerate(types_of)))
        metadata = types.SimpleNamespace(tensordesc_meta=descriptors)
        return types.SimpleNamespace(src=source, metadata=metadata)

    kernels = [kernel("*fp32", "i32"), kernel("*fp32", "i64"), kernel("*fp32", "i32")]
    kernels += [kernel("*fp32", "i32", descriptors=[{"swizzle": 1}])]
    active = types.SimpleNamespace(launcher_cls=launcher)
    monkeypatch.setattr(type(driver), "active", property(lambda _: active))
    for needed, count in ((False, 0), (True, 3)):
        monkeypatch.setattr(compile_ahead, "builds_launchers", lambda needed=needed: needed)
        launchers = compile_ahead.Launchers()
        for each in kernels:
            launchers.build(each)
        assert len(built) == count


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_the_process_may_use() -> None:
    """A server that shares a machine compiles on its own cores."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert _cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert _cores() == len(allowed)
