"""The GPU kernels' speed: every family's cases, against this device's own ceilings."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

from anymla.bench import kernels, runner
from anymla.bench.gpu_timing import copies_for
from anymla.bench.kernels import Case
from anymla.bench.runner import Clock, Subject, Values, Verdict, rounded
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_enabled


def families() -> list[str]:
    """Names of the modules that have cases."""
    found = []
    for module in pkgutil.iter_modules(kernels.__path__):
        if hasattr(importlib.import_module(f"{kernels.__name__}.{module.name}"), "cases"):
            found.append(module.name)
    return found


def device_facts() -> dict[str, Any]:
    """The device as rows name it."""
    import triton

    if not torch.cuda.is_available():
        return {
            "device": torch.xpu.get_device_properties(0).name,
            "multiprocessors": target_of(torch.device("xpu", 0)).sm_count,
            "xpu": torch.version.xpu,
            "triton": triton.__version__,
        }
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "early_launches": pdl_enabled(torch.device("cuda", torch.cuda.current_device())),
    }


def cases(chosen: list[str]) -> Iterator[runner.Case]:
    """The cases of the chosen families."""
    for family in chosen:
        module = importlib.import_module(f"{kernels.__name__}.{family}")
        for each in module.cases():
            case = each if isinstance(each, Case) else Case(*each)
            judge = functools.partial(_row, case)
            yield runner.Case(family, case.label, functools.partial(_subject, case), judge=judge)


def _subject(case: Case, clock: Clock) -> Iterator[Subject]:
    moved = case.bytes_moved

    def after(us: float) -> Values:
        found = {
            "gb_per_s": moved / us * 1e-3,
            "share_of_copy": moved / us * 1e6 / clock.copy_bandwidth(),
        }
        if case.flops:
            found["tflops"] = case.flops / us * 1e-6
            found["share_of_product"] = case.flops / us * 1e6 / clock.matmul_rate()
        if case.share is not None and case.most_us is None:
            found["copy_us"] = clock.copy_us(moved)
            found["share_of_same_copy"] = found["copy_us"] / us
        return found

    with clock.device:
        calls = [case.setup() for _ in range(copies_for(moved))]
    yield Subject("us", calls, after=after)


def _row(case: Case, values: Values) -> tuple[Values, Verdict]:
    verdict = None
    if case.most_us is not None:
        verdict = f"<= {case.most_us} us", values["us"] <= case.most_us
    digits = {"us": 2, "gb_per_s": 1, "tflops": 1, "copy_us": 2}
    shares = ("share_of_copy", "share_of_product", "share_of_same_copy")
    values = rounded(values, digits | dict.fromkeys(shares, 3))
    if verdict is None and case.share is not None:
        verdict = f"share_of_copy >= {case.share}", values["share_of_copy"] >= case.share
    return values, verdict
