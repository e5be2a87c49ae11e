"""The GPU kernels' speed: every family's cases, against this device's own ceilings."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

from anymla.bench import kernels
from anymla.bench.gpu_timing import (
    copies_for,
    copy_bandwidth,
    copy_us,
    matmul_rate,
    time_us,
)
from anymla.bench.kernels import Case
from anymla.bench.report import Result
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

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "early_launches": pdl_enabled(torch.device("cuda", torch.cuda.current_device())),
    }


def run(chosen: list[str]) -> Iterator[Result]:
    """Ceilings first, then the cases of the chosen families."""
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    yield Result("device", "copy", {"tb_per_s": bandwidth / 1e12})
    yield Result("device", "bf16 product 8192^3", {"tflops": rate / 1e12})
    for family in chosen:
        module = importlib.import_module(f"{kernels.__name__}.{family}")
        for each in module.cases():
            yield _measure(family, each if isinstance(each, Case) else Case(*each), bandwidth, rate)


def _measure(family: str, case: Case, bandwidth: float, rate: float) -> Result:
    try:
        calls = [case.setup() for _ in range(copies_for(case.bytes_moved))]
        microseconds = time_us(calls)
    except Exception as error:  # a kernel that fails must not hide the others
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return Result(family, case.label, {"error": problem}, "runs", False)
    values: dict[str, Any] = {
        "us": round(microseconds, 2),
        "gb_per_s": round(case.bytes_moved / microseconds * 1e-3, 1),
        "share_of_copy": round(case.bytes_moved / microseconds * 1e6 / bandwidth, 3),
    }
    if case.flops:
        values["tflops"] = round(case.flops / microseconds * 1e-6, 1)
        values["share_of_product"] = round(case.flops / microseconds * 1e6 / rate, 3)
    if case.most_us is not None:
        met = microseconds <= case.most_us
        return Result(family, case.label, values, f"<= {case.most_us} us", met)
    if case.share is not None:
        values["copy_us"] = round(copy_us(case.bytes_moved), 2)
        values["share_of_same_copy"] = round(values["copy_us"] / values["us"], 3)
        met = values["share_of_copy"] >= case.share
        return Result(family, case.label, values, f"share_of_copy >= {case.share}", met)
    return Result(family, case.label, values)
