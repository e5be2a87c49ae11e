"""Where the time of a decode layer goes: whole layers as one CUDA graph, and a layer's kernels."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import anymla.ops
from anymla.bench.gpu_timing import copy_bandwidth, matmul_rate, time_us
from anymla.bench.layer_rival import compile_unfused, rival_kernels
from anymla.bench.layer_setup import MODELS, DecodeBatch, LayerCase, LayerSetup
from anymla.bench.layer_work import layer_work
from anymla.bench.report import Result
from anymla.bench.timeline import timeline
from anymla.layers.plans import Plans
from anymla.layers.side_stream import INLINE, SideStream
from anymla.ops.compile_ahead import compiled_together
from anymla.runtime.options import EngineOptions

PART = "decode layer"
RATIOS, BATCHES, CONTEXTS = (0, 4, 128), (1, 8, 32, 128), (4096, 65536, 524288)
_LAUNCH_US = 3.0
_FACTOR = 2.5
# FlashMLA, and DeepGEMM or None.
Others = tuple[Any, Any]
# How often each copy of a layer follows in a graph: a model's graph has tens of layers, so that
# little of what starting a graph takes is left for each.
_ROUNDS = 3
_NAME = 48  # characters of a kernel's name that tell it apart


def cases(
    models: Iterable[str] = tuple(MODELS),
    ratios: Iterable[int] = RATIOS,
    batches: Iterable[int] = BATCHES,
    contexts: Iterable[int] = CONTEXTS,
) -> Iterator[LayerCase]:
    """Every combination; a layer without entries takes as long at every context."""
    batches, contexts = tuple(batches), tuple(contexts)
    for model in models:
        for ratio in ratios:
            for context in contexts if ratio else contexts[:1]:
                for batch in batches:
                    yield LayerCase(model, ratio, batch, context)


def run(
    chosen: Iterable[LayerCase],
    *,
    beside: bool | None = None,
    others: Others | None = None,
    timelines: bool = False,
) -> Iterator[Result]:
    """Measure the cases; those of one layer should follow each other.

    Args:
        chosen: what to measure.
        beside: ``EngineOptions.side_stream``.
        others: modules to measure the same layer assembled from as well.
        timelines: also see when each kernel starts and ends.
    """
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    yield Result("device", "copy", {"tb_per_s": bandwidth / 1e12})
    device = torch.device("cuda")
    options, second = EngineOptions(side_stream=beside), SideStream(device)
    with torch.inference_mode():
        for (model, ratio, experts), same in itertools.groupby(chosen, _layer):
            torch.cuda.empty_cache()
            setup = LayerSetup(model, ratio, device, experts=experts)
            batches = []
            for case in same:
                side = second if options.runs_beside(case.batch) else INLINE
                batches.append((case, setup.batch(case.batch, case.context, side)))
            compile_ahead(setup, [batch for _, batch in batches], others)
            for case, batch in batches:
                yield measure(setup, case, batch, bandwidth, rate, others)
                if timelines:
                    yield _timeline(setup, case, batch)
            del setup, batches


def _timeline(setup: LayerSetup, case: LayerCase, batch: DecodeBatch) -> Result:
    calls = [lambda layer=layer: batch.run(layer) for layer in setup.layers]
    spans = timeline(calls, torch.cuda.Stream())
    values = {"us": max(span.end for span in spans)}
    kernels = [dataclasses.astuple(span) for span in spans]
    return Result(f"{PART}, timeline", _name(case), values | {"timeline_us": kernels})


def _name(case: LayerCase) -> str:
    return f"{case.model}, ratio {case.ratio}, batch {case.batch}, context {case.context}"


def _layer(case: LayerCase) -> tuple[str, int, int]:
    return case.model, case.ratio, case.experts


def compile_ahead(
    setup: LayerSetup, batches: Iterable[DecodeBatch], others: Others | None = None
) -> None:
    """Compile the batches' kernels in parallel, where there are any to compile."""
    with compiled_together() as only_compiled:
        if only_compiled:
            for batch in batches:
                # What is only compiled leaves garbage, also in the plans of a step.
                step = dataclasses.replace(batch.step, plans=Plans())
                dataclasses.replace(batch, step=step).run(setup.layers[0])
                if others is not None:
                    compile_unfused(setup.layers[0].ffn_site, batch.streams)


def measure(
    setup: LayerSetup,
    case: LayerCase,
    batch: DecodeBatch,
    bandwidth: float,
    rate: float,
    others: Others | None = None,
) -> Result:
    """One case: microseconds, launches, microseconds by family of kernels, share of the roofline.

    Microseconds are of one of the layers that follow each other in a graph.

    ``times_others`` is how many times as long the layer takes from others' kernels. The families'
    times are of single kernels, without the gaps between them; ``kernels_us`` has for every kernel
    how often it is launched, and the microseconds of all its launches.
    """
    calls = [lambda layer=layer: batch.run(layer) for layer in setup.layers]
    microseconds = time_us(calls * _ROUNDS)
    beside: dict[str, Any] = {}
    if others is not None:
        inline = dataclasses.replace(batch, step=dataclasses.replace(batch.step, side=INLINE))
        theirs = [lambda layer=layer: inline.run(layer) for layer in setup.layers]
        with rival_kernels(*others):
            taken = time_us(theirs * _ROUNDS)
            seen = kernel_times(theirs[0])
            beside = {"others_us": round(taken, 1), "times_others": round(taken / microseconds, 2)}
            beside["others_launches"] = len(seen)
            beside["others_parts_us"] = sums((family(name), taken) for name, taken in seen)
    kernels = kernel_times(calls[0])
    visited = setup.visited(batch)
    work = layer_work(setup.layers[0], setup.config, batch, visited)
    roofline = work.roofline_us(bandwidth, rate)
    launches = len(kernels)
    allowed = _FACTOR * roofline + _LAUNCH_US * launches
    judged = case.batch <= 8
    return Result(
        PART,
        _name(case),
        {
            "us": round(microseconds, 1),
            **beside,
            "launches": launches,
            "queues": 1 if batch.step.side is INLINE else 3,
            "layers_of_graph": _ROUNDS * len(calls),
            "roofline_us": round(roofline, 1),
            "share_of_roofline": round(roofline / microseconds, 3),
            "weights_mb": round(work.weight_bytes / 1e6, 1),
            "caches_mb": round(work.cache_bytes / 1e6, 1),
            "visited_experts": visited,
            "parts_us": sums((family(name), taken) for name, taken in kernels),
            "kernels_us": {
                name: [sum(name == other[:_NAME] for other, _ in kernels), taken]
                for name, taken in sums((name[:_NAME], taken) for name, taken in kernels).items()
            },
        },
        target=f"<= {_FACTOR} x roofline + {_LAUNCH_US} us a launch" if judged else None,
        met=microseconds <= allowed if judged else None,
    )


def sums(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by name, the largest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, taken in times:
        sums[name] += taken
    return {name: round(taken, 1) for name, taken in sorted(sums.items(), key=_by_time)}


def _by_time(item: tuple[str, float]) -> float:
    return -item[1]


def kernel_times(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels of one call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [
        (event.name, event.device_time_total)
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    ]


def family(kernel: str) -> str:
    """The family of operations that a kernel belongs to; "torch" for torch's and the vendor's."""
    return _families().get(kernel, "torch")


_FOUND: dict[str, str] = {}


def _families() -> dict[str, str]:
    """Family of every kernel of the package by its name."""
    if not _FOUND:
        for found in pkgutil.iter_modules(anymla.ops.__path__):
            if not found.ispkg:
                continue
            path = importlib.import_module(f"anymla.ops.{found.name}").__path__
            for module in pkgutil.iter_modules(path, f"anymla.ops.{found.name}."):
                if "triton_" in module.name or "gluon_" in module.name:
                    for name in vars(importlib.import_module(module.name)):
                        if name.endswith("_kernel"):
                            _FOUND.setdefault(name, found.name)
    return _FOUND
