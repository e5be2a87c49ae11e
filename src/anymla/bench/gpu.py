"""Named cases of operations, layers and steps, against this device's own ceilings."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anymla.bench import kernels
from anymla.bench.gpu_timing import copies_for
from anymla.bench.kernels import TimedCall
from anymla.bench.runner import Case, Clock, Subject, Values, Verdict, rounded
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_enabled


def families() -> list[str]:
    """List the names of the modules that have cases."""
    found = []
    for module in pkgutil.iter_modules(kernels.__path__):
        if hasattr(importlib.import_module(f"{kernels.__name__}.{module.name}"), "cases"):
            found.append(module.name)
    return found


def device_facts() -> dict[str, Any]:
    """Return fields that name the accelerator; none without one, since rows name the CPU."""
    if not (torch.cuda.is_available() or torch.xpu.is_available()):
        return {}
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


def cases(chosen: list[str]) -> Iterator[Case]:
    """Yield the cases of the chosen families."""
    for family in chosen:
        module = importlib.import_module(f"{kernels.__name__}.{family}")
        for each in module.cases():
            if isinstance(each, TimedCall):
                subjects = functools.partial(_subject, each)
                yield Case(family, each.label, subjects, judge=_rounded)
            else:
                yield each


def name_of(case: Case) -> str:
    """Return the name of a case in ``anymla bench run``, such as "cache/rope-64-tokens"."""
    return f"{case.part}/{re.sub('[^a-z0-9]+', '-', case.label.lower()).strip('-')}"


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, in their order.

    Args:
        names: names of cases, names of families for all of their cases, or "all".

    Raises:
        ValueError: there is nothing of a name; the message has the nearest ones.
    """
    every = {name_of(case): case for case in cases(families())}
    found: dict[str, Case] = {}
    for name in names:
        given = {key: case for key, case in every.items() if name in (key, case.part, "all")}
        if not given:
            near = difflib.get_close_matches(name, [*every, *families()], cutoff=0.4)
            said = f"did you mean {' or '.join(near)}?" if near else "anymla bench run lists them"
            raise ValueError(f"{name}: no such case: {said}")
        found |= given
    return list(found.values())


def _subject(call: TimedCall, clock: Clock) -> Iterator[Subject]:
    moved = call.bytes_moved

    def after(us: float) -> Values:
        found = {
            "gb_per_s": moved / us * 1e-3,
            "share_of_copy": moved / us * 1e6 / clock.copy_bandwidth(),
        }
        if call.flops:
            found["tflops"] = call.flops / us * 1e-6
            found["share_of_product"] = call.flops / us * 1e6 / clock.matmul_rate()
        if call.beside_copy:
            found["copy_us"] = clock.copy_us(moved)
            found["share_of_same_copy"] = found["copy_us"] / us
        return found

    with clock.device:
        calls = [call.setup() for _ in range(copies_for(moved))]
    yield Subject("us", calls, after=after)


def _rounded(values: Values) -> tuple[Values, Verdict]:
    digits = {"us": 2, "gb_per_s": 1, "tflops": 1, "copy_us": 2}
    shares = ("share_of_copy", "share_of_product", "share_of_same_copy")
    return rounded(values, digits | dict.fromkeys(shares, 3)), None
