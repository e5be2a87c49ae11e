"""Index scores and selection, next to DeepGEMM's scores with other top-k kernels.

64 heads of 128 channels, FP8 keys in pages of 64, k = 512. A decode is next_n queries a request
over all of its keys; a prefill is the last queries of one request, each seeing the keys before it
(ratio 4).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for
from anymla.bench.runner import Call, Case, Clock, Subject, Values, Verdict
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import select_topk
from anymla.ops.indexer.shapes import V4_FLASH, SelectShape
from lab.peers.deep_gemm import DeepGemm, Scores
from lab.peers.vllm import Select, VllmTopk

PART = "indexer"
HEADS, WIDTH, PAGE = V4_FLASH.heads, V4_FLASH.channels, V4_FLASH.page_size
TOPK, RATIO = V4_FLASH.topk, V4_FLASH.ratio
# The modules of ops.indexer that have a backend's scores.
SCORES = {"triton": "triton_scores", "gluon_sm90": "gluon_sm90_launch"}
_PAGE_BYTES = PAGE * (WIDTH + 4)
_POOL_BYTES = 512 << 20
_MOST_SETS = 16
_VLLM = "vllm "  # in front of a kernel's name, until the fastest is known


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of arguments; all sets of a shape share the pool of pages."""

    q: Tensor
    weights: Tensor
    lengths: Tensor
    table: Tensor
    cache: Tensor

    def select(self, backend: str, shape: SelectShape) -> Tensor:
        """Run anymla."""
        slots: Tensor = select_topk(*self._arguments, max_context=shape.keys, backend=backend)
        return slots

    def can(self, backend: str, shape: SelectShape) -> bool:
        """Return True if a backend takes a shape."""
        support = select_topk.supports(*self._arguments, max_context=shape.keys, backend=backend)
        return bool(support)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.q, self.cache, self.weights, self.lengths, self.table, TOPK


class Pool:
    """Pages of random keys."""

    def __init__(self, pages: int, device: torch.device) -> None:
        """Draw them; the cases' seeds do not depend on it."""
        random = torch.Generator(device).manual_seed(0)
        draw = functools.partial(torch.randn, device=device, generator=random)
        self.cache = torch.empty(pages, PAGE, WIDTH + 4, dtype=torch.uint8, device=device)
        flat = self.cache.view(pages, -1)
        for first in range(0, pages, 1 << 15):
            part = flat[first : first + (1 << 15)]
            keys = draw(len(part), PAGE * WIDTH).to(torch.float8_e4m3fn)
            part[:, : PAGE * WIDTH] = keys.view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device=device, generator=random) + 0.5
            part[:, PAGE * WIDTH :] = scales.view(torch.uint8)

    def inputs(self, shape: SelectShape, copies: int) -> list[Inputs]:
        """Draw sets of inputs that read different pages."""
        device = self.cache.device
        each = shape.requests * shape.keys // PAGE
        order = torch.randperm(len(self.cache), device=device).int()
        sets = []
        for copy in range(copies):
            first = copy * each % (len(self.cache) - each + 1)
            table = order[first : first + each].view(shape.requests, -1)
            q = torch.randn(shape.rows, HEADS, WIDTH, device=device).to(torch.float8_e4m3fn)
            weights = torch.randn(shape.rows, HEADS, device=device)
            lengths = torch.full((shape.rows,), shape.keys, dtype=torch.int32, device=device)
            if shape.prefill:
                last = torch.arange(1, shape.rows + 1, device=device) - shape.rows
                lengths = ((last + RATIO * shape.keys) // RATIO).int()
            sets.append(Inputs(q, weights, lengths, table, self.cache))
        return sets


def pages_needed(shapes: Sequence[SelectShape]) -> int:
    """Return the pages of a pool from which every shape can take cold inputs."""
    cold = copies_for(1) * 64
    return max([cold, _POOL_BYTES // _PAGE_BYTES, *(s.requests * s.keys // PAGE for s in shapes)])


def cases(
    shapes: Sequence[SelectShape],
    backends: Sequence[str],
    deep_gemm: DeepGemm | None,
    vllm: VllmTopk | None,
) -> Iterator[Case]:
    """Yield every shape by every backend that takes it, beside the given peers."""
    pool = functools.cache(lambda device: Pool(pages_needed(shapes), device))
    for shape in shapes:
        yield Case(
            PART,
            shape.label,
            functools.partial(_subjects, shape, pool, backends, deep_gemm, vllm),
            judge=functools.partial(_row, backends),
        )


def _row(backends: Sequence[str], values: Values) -> tuple[Values, Verdict]:
    """Name the fastest of vLLM's kernels, and compare the peers' times with our best."""
    times = {name: us for name, us in values.items() if name.startswith(_VLLM)}
    row: Values = {}
    for name, value in values.items():
        if name not in times:
            row[name] = round(value, 2) if name.endswith("_us") else value
    if times:
        fastest = min(times, key=lambda name: times[name])
        row |= {"vllm_us": round(times[fastest], 2), "vllm_kernel": fastest.removeprefix(_VLLM)}
    best = min((row.get(f"{backend}_us", torch.inf) for backend in backends), default=torch.inf)
    for name in ("topk", "vllm"):
        if f"{name}_us" in row:
            row[f"over_{name}"] = round(row[f"{name}_us"] / best, 2)
    return row, None


def _subjects(
    shape: SelectShape,
    pool: Callable[[torch.device], Pool],
    backends: Sequence[str],
    deep_gemm: DeepGemm | None,
    vllm: VllmTopk | None,
    clock: Clock,
) -> Iterator[Subject]:
    copies = copies_for(shape.requests * shape.keys * (WIDTH + 4))
    sets = pool(clock.device).inputs(shape, min(copies, _MOST_SETS))
    work = shape.rows * shape.keys
    repetitions = 4 if work > 1 << 24 else 8

    def timed(field: str, calls: Sequence[Call], memory: str = "", **more: Any) -> Subject:
        def before() -> Values:
            return {memory: round(clock.peak_bytes(calls[0]) / 1e6, 1)} if memory else {}

        few = calls[:1] if work > 1 << 28 else calls
        return Subject(field, few, repetitions, before=before, **more)

    if deep_gemm is not None:
        scores = [deep_gemm.scores(shape, given) for given in sets]
        yield timed("deep_gemm_us", [functools.partial(call, False) for call in scores])
        yield timed("topk_us", [functools.partial(_by_torch, call) for call in scores], "topk_mb")
        if vllm is not None:
            for name, select in vllm.selectors(shape, TOPK, clock.device).items():
                pairs = zip(scores, sets, strict=True)
                calls = [functools.partial(_by_kernel, select, *pair) for pair in pairs]
                # Not every kernel takes every shape.
                yield timed(_VLLM + name, calls, optional=True)
    for backend in backends:
        if sets[0].can(backend, shape):
            only = [functools.partial(score_only, backend, given, shape) for given in sets]
            yield timed(f"{backend}_scores_us", only)
            whole = [functools.partial(given.select, backend, shape) for given in sets]
            yield timed(f"{backend}_us", whole, f"{backend}_mb")


def _by_torch(scores: Scores) -> object:
    return scores(True).topk(TOPK, dim=-1)


def _by_kernel(select: Select, scores: Scores, given: Inputs) -> object:
    return select(scores(False), given.lengths)


def score_only(backend: str, given: Inputs, shape: SelectShape) -> None:
    """Compute the scores of a selection without the top-k, in its own chunks."""
    from anymla.ops.device import target_of
    from anymla.ops.indexer.config import GROUP, choose_select_config, padded_entries
    from anymla.ops.indexer.inputs import select_inputs
    from anymla.ops.indexer.interface import SCRATCH_BYTES

    write_scores = importlib.import_module(f"anymla.ops.indexer.{SCORES[backend]}").write_scores
    device = given.q.device
    target = target_of(device)
    config = choose_select_config(
        shape.rows,
        shape.keys,
        TOPK,
        target=target,
        scratch_bytes=SCRATCH_BYTES,
        histograms=backend == "gluon_sm90",
    )
    columns = padded_entries(shape.keys)
    scores = torch.empty(config.chunk, columns, device=device)
    maxima = None
    if config.algorithm == "groups":
        maxima = torch.empty(config.chunk, columns // GROUP, dtype=torch.int32, device=device)
    inputs = select_inputs(
        given.q, None, given.weights, given.cache, INDEX_FP8, given.table, given.lengths,
        None, shape.keys, TOPK,
    )  # fmt: skip
    for first in range(0, shape.rows, config.chunk):
        write_scores(inputs.chunk(slice(first, first + config.chunk)), scores, maxima, target)
