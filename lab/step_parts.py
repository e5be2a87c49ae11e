"""Parts of decode steps' time, from a profiler's trace of replayed graphs.

Kernels of a step overlap: some are launched early, some run on further streams. So each kernel
counts with the time by which it delays the step's end, and the parts add up to the time of the
steps.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from lab.kernel_files import family_of
from lab.trace import Event, end_of, traced

DRAFT, BETWEEN, GAPS, HEAD = "draft", "between graphs", "gaps in graphs", "head and choice"
# Parts of the package's kernels by their family.
FAMILIES = {
    "attention": "attention",
    "indexer": "indexer",
    "compressor": "compressor",
    "moe": "experts",
    "linear": "linears",
    "engram": "n-grams",
    "hyper_connection": "hyper-connections",
    "norm_rope": "norms, RoPE, rows",
    "kv_cache": "norms, RoPE, rows",
    "step_indices": "metadata",
}
# Words in the names of kernels that are not the package's own.
_OTHERS = (
    ("broadcast", "agreement"),
    ("nccl", "all-reduce"),
    ("push_sum", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("gemm", "linears, cuBLAS"),
    ("gemv", "linears, cuBLAS"),
    ("nvjet", "linears, cuBLAS"),
    ("cutlass", "linears, cuBLAS"),
    ("splitk", "linears, cuBLAS"),
)
# A launch of at least this many kernels is that of a graph.
_GRAPH = 8
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Mean microseconds of a step, by part.

    Attributes:
        us: from one step's first kernel to the next one's.
        parts: time by what the step's graph spends it on. ``DRAFT`` is everything after the
            backbone's choice, ``BETWEEN`` is outside graphs (the host and its copies), ``GAPS`` is
            time in the backbone's part of the graph with nothing on the device.
        draft_parts: time by what the drafter's part of the graph spends it on.
        launches: number of kernels of a step.
    """

    us: float
    parts: dict[str, float]
    draft_parts: dict[str, float]
    launches: float


def profiled(step: Callable[[], object], count: int) -> list[Event]:
    """Return the trace events of some steps on the current CUDA device, and of one step more."""
    return traced(lambda: [step() for _ in range(count + 1)])


def step_parts(events: Iterable[Event], count: int, *, drafts: bool) -> StepParts | None:
    """Take steps apart; None if the trace does not show their graphs.

    Args:
        events: trace events as ``profiled`` returned them.
        count: number of steps, without the last.
        drafts: each step drafts behind its choice, in the same graph.
    """
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    kernels.sort(key=lambda event: float(event["ts"]))
    by_launch = collections.defaultdict(list)
    for event in kernels:
        by_launch[event["args"].get("correlation")].append(event)
    graphs = [launch for launch, some in by_launch.items() if len(some) >= _GRAPH]
    if len(graphs) != count + 1:
        return None
    chosen = {launch: _chosen(by_launch[launch]) if drafts else math.inf for launch in graphs}
    heads = {launch: _head(by_launch[launch], chosen[launch]) for launch in graphs}
    ends = {launch: _head(by_launch[launch], math.inf) for launch in graphs}
    begin = float(by_launch[graphs[0]][0]["ts"])
    end = float(by_launch[graphs[count]][0]["ts"])

    parts: dict[str, float] = collections.defaultdict(float)
    draft_parts: dict[str, float] = collections.defaultdict(float)
    last, before, launches = begin, None, 0
    for event in kernels:
        start, stop = float(event["ts"]), end_of(event)
        if not begin <= start < end:
            continue
        launches += 1
        launch = event["args"].get("correlation")
        idle = max(0.0, start - last)
        adds = max(0.0, min(stop, end) - max(last, start))
        name = _part(str(event["name"]))
        if start > chosen.get(launch, math.inf):
            gap = idle if before == launch else 0.0
            parts[DRAFT] += adds + gap
            draft_parts[name if start < ends[launch] else HEAD] += adds
            draft_parts[GAPS] += gap
        else:
            name = name if start < heads.get(launch, stop) else HEAD
            parts[name if launch in heads else BETWEEN] += adds
            parts[GAPS] += idle if before == launch else 0.0
        parts[BETWEEN] += 0.0 if before == launch else idle
        last, before = max(last, stop), launch
    parts[BETWEEN] += max(0.0, end - last)
    return StepParts(
        (end - begin) / count, _means(parts, count), _means(draft_parts, count), launches / count
    )


def _chosen(kernels: Sequence[Event]) -> float:
    """Return the time at which the backbone's tokens are chosen, by the first choice of a graph."""
    for event, following in zip(kernels, [*kernels[1:], None], strict=True):
        if family_of(str(event["name"])) == "choice" and (
            following is None or family_of(str(following["name"])) != "choice"
        ):
            return float(event["ts"])
    return math.inf


def _head(kernels: Sequence[Event], before: float) -> float:
    """Return the time of the last collapse of the streams in a graph before ``before``."""
    collapses = [
        float(event["ts"])
        for event in kernels
        if family_of(str(event["name"])) == "hyper_connection" and float(event["ts"]) < before
    ]
    return collapses[-1] + 1e-3 if collapses else math.inf


def _part(name: str) -> str:
    known = FAMILIES.get(family_of(name))
    if known is not None:
        return known
    low = name.lower()
    return next((part for word, part in _OTHERS if word in low), "other")


def _means(sums: dict[str, float], count: int) -> dict[str, float]:
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: round(total / count, 1) for name, total in ordered if total}
