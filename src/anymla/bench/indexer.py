"""Scores and selection on a GPU, next to DeepGEMM's scores with other top-k kernels.

All in one process, CUDA-graph replay over rotating inputs, medians. 64 heads of 128 channels, FP8
keys in pages of 64, k = 512. A decode is next_n queries a request over all of its keys; a prefill
is the last queries of one request, each seeing the keys before it (ratio 4).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import copies_for, time_us
from anymla.bench.report import Result
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import select_topk

HEADS, WIDTH, PAGE, TOPK, RATIO = 64, 128, 64, 512, 4
_PAGE_BYTES = PAGE * (WIDTH + 4)
_VLLM_WORKSPACE = 1 << 20
Call = Callable[[], object]
# A peer's scores, with -inf written where nothing is visible if asked; and a peer's selector.
_Scores = Callable[[bool], Tensor]
_Select = Callable[[Tensor, Tensor], object]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one case: ``requests`` of ``queries`` each over ``keys``; prefills are causal."""

    requests: int
    queries: int
    keys: int
    prefill: bool = False

    @property
    def rows(self) -> int:
        """Queries in all."""
        return self.requests * self.queries

    @property
    def label(self) -> str:
        """For people."""
        if self.prefill:
            return f"prefill {self.queries} x {self.keys}"
        return f"decode {self.requests} x {self.queries} x {self.keys}"


DECODES = tuple(
    Shape(requests, queries, keys)
    for keys in (2048, 8192, 32_768, 262_144)
    for requests in (1, 8, 32, 128)
    for queries in (1, 2)
)
PREFILLS = tuple(
    Shape(1, queries, keys, prefill=True)
    for queries in (2048, 8192)
    for keys in (8192, 65_536, 262_144)
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of arguments; all sets of a shape share the pool of pages."""

    q: Tensor
    weights: Tensor
    lengths: Tensor
    table: Tensor
    cache: Tensor


class Pool:
    """Pages of random keys."""

    def __init__(self, pages: int) -> None:
        self.cache = torch.empty(pages, PAGE, WIDTH + 4, dtype=torch.uint8, device="cuda")
        flat = self.cache.view(pages, -1)
        for first in range(0, pages, 1 << 15):
            part = flat[first : first + (1 << 15)]
            keys = torch.randn(len(part), PAGE * WIDTH, device="cuda").to(torch.float8_e4m3fn)
            part[:, : PAGE * WIDTH] = keys.view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") + 0.5
            part[:, PAGE * WIDTH :] = scales.view(torch.uint8)

    def inputs(self, shape: Shape, copies: int) -> list[Inputs]:
        """Sets of inputs that read different pages."""
        each = shape.requests * shape.keys // PAGE
        order = torch.randperm(len(self.cache), device="cuda").int()
        sets = []
        for copy in range(copies):
            first = copy * each % (len(self.cache) - each + 1)
            table = order[first : first + each].view(shape.requests, -1)
            q = torch.randn(shape.rows, HEADS, WIDTH, device="cuda").to(torch.float8_e4m3fn)
            weights = torch.randn(shape.rows, HEADS, device="cuda")
            lengths = torch.full((shape.rows,), shape.keys, dtype=torch.int32, device="cuda")
            if shape.prefill:
                last = torch.arange(1, shape.rows + 1, device="cuda") - shape.rows
                lengths = ((last + RATIO * shape.keys) // RATIO).int()
            sets.append(Inputs(q, weights, lengths, table, self.cache))
        return sets


def pages_needed(shapes: Sequence[Shape]) -> int:
    """Pages of a pool from which every shape can take cold inputs."""
    cold = copies_for(1) * 64
    return max([cold, (512 << 20) // _PAGE_BYTES, *(s.requests * s.keys // PAGE for s in shapes)])


def run(
    shapes: Sequence[Shape], backends: Sequence[str], topk_library: Path | None = None
) -> Iterator[Result]:
    """Time every shape with every backend, next to the peers that this machine has."""
    deep_gemm = importlib.import_module("deep_gemm") if _has("deep_gemm") else None
    if topk_library is not None:
        torch.ops.load_library(topk_library)
    pool = Pool(pages_needed(shapes))
    for shape in shapes:
        copies = copies_for(shape.requests * shape.keys * (WIDTH + 4))
        sets = pool.inputs(shape, min(copies, 16))
        values: dict[str, Any] = {}
        if deep_gemm is not None:
            values |= _peers(deep_gemm, shape, sets, topk_library is not None)
        usable = [backend for backend in backends if _usable(backend, shape, sets[0])]
        for backend in usable:
            values |= _ours(backend, shape, sets)
        best = min((values[f"{backend}_us"] for backend in usable), default=torch.inf)
        for name in ("topk", "vllm"):
            if f"{name}_us" in values:
                values[f"over_{name}"] = round(values[f"{name}_us"] / best, 2)
        yield Result("indexer", shape.label, values)


def _usable(backend: str, shape: Shape, given: Inputs) -> bool:
    return bool(
        select_topk.supports(
            given.q,
            given.cache,
            given.weights,
            given.lengths,
            given.table,
            TOPK,
            max_context=shape.keys,
            backend=backend,
        )
    )


def _ours(backend: str, shape: Shape, sets: list[Inputs]) -> dict[str, Any]:
    def call(given: Inputs) -> Call:
        return lambda: select_topk(
            given.q,
            given.cache,
            given.weights,
            given.lengths,
            given.table,
            TOPK,
            max_context=shape.keys,
            backend=backend,
        )

    def scores(given: Inputs) -> Call:
        return lambda: score_only(backend, given, shape)

    peak = _peak_bytes(call(sets[0]))
    return {
        f"{backend}_scores_us": _time([scores(given) for given in sets], shape),
        f"{backend}_us": _time([call(given) for given in sets], shape),
        f"{backend}_mb": round(peak / 1e6, 1),
    }


def score_only(backend: str, given: Inputs, shape: Shape) -> None:
    """The scores of a selection without the selection, in its own rounds."""
    from anymla.ops import _triton
    from anymla.ops.indexer.interface_select import SCRATCH_BYTES
    from anymla.ops.indexer.selection_plan import GROUP, padded_entries, plan_selection

    name = {"triton": "triton_select_scores", "gluon_sm90": "gluon_sm90_select"}[backend]
    scorer = importlib.import_module(f"anymla.ops.indexer.{name}").select_scores
    device = given.q.device
    plan = plan_selection(
        shape.rows,
        shape.keys,
        TOPK,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        scratch_bytes=SCRATCH_BYTES,
        histograms=backend == "gluon_sm90",
    )
    columns = padded_entries(shape.keys)
    scores = torch.empty(plan.rows, columns, device=device)
    maxima = None
    if plan.form == "groups":
        maxima = torch.empty(plan.rows, columns // GROUP, dtype=torch.int32, device=device)
    for first in range(0, shape.rows, plan.rows):
        part = slice(first, first + plan.rows)
        scorer(
            given.q[part],
            None,
            given.weights[part],
            given.cache,
            INDEX_FP8,
            given.table,
            given.lengths[part],
            None,
            None,
            scores,
            maxima,
            first_row=first,
            per_request=shape.queries,
            covered=shape.keys,
            k=TOPK,
            target=_triton.target_of(device),
        )


def _peers(deep_gemm: Any, shape: Shape, sets: list[Inputs], with_vllm: bool) -> dict[str, Any]:
    """DeepGEMM's scores alone, with torch.topk, and with vLLM's kernels."""
    scores = _prefill_scores if shape.prefill else _decode_scores
    calls = [scores(deep_gemm, shape, given) for given in sets]

    def with_torch(call: _Scores) -> object:
        return call(True).topk(TOPK, dim=-1)

    def with_kernel(select: _Select, call: _Scores, given: Inputs) -> object:
        return select(call(False), given.lengths)

    torch_calls = [partial(with_torch, call) for call in calls]
    values: dict[str, Any] = {
        "deep_gemm_us": _time([partial(call, False) for call in calls], shape),
        "topk_us": _time(torch_calls, shape),
        "topk_mb": round(_peak_bytes(torch_calls[0]) / 1e6, 1),
    }
    if with_vllm:
        times = {}
        for name, select in _vllm_kernels(shape).items():
            pairs = zip(calls, sets, strict=True)
            # Not every kernel takes every shape.
            with contextlib.suppress(RuntimeError):
                times[name] = _time(
                    [partial(with_kernel, select, call, given) for call, given in pairs], shape
                )
        if times:
            fastest = min(times, key=lambda name: times[name])
            values |= {"vllm_us": times[fastest], "vllm_kernel": fastest}
    return values


def _decode_scores(deep_gemm: Any, shape: Shape, given: Inputs) -> _Scores:
    lengths = given.lengths.view(shape.requests, shape.queries)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    q = given.q.view(shape.requests, shape.queries, HEADS, WIDTH)
    cache = given.cache.unsqueeze(2)

    def call(clean: bool) -> Tensor:
        logits: Tensor = deep_gemm.fp8_paged_mqa_logits(
            q, cache, given.weights, lengths, given.table, plan, shape.keys, False
        )
        return logits

    return call


def _prefill_scores(deep_gemm: Any, shape: Shape, given: Inputs) -> _Scores:
    pages = given.cache.view(len(given.cache), -1)[given.table[0].long()]
    keys = pages[:, : PAGE * WIDTH].contiguous().view(torch.float8_e4m3fn).view(-1, WIDTH)
    scale = pages[:, PAGE * WIDTH :].contiguous().view(torch.float32).view(-1)
    starts = torch.zeros_like(given.lengths)

    def call(clean: bool) -> Tensor:
        logits: Tensor = deep_gemm.fp8_mqa_logits(
            given.q, (keys, scale), given.weights, starts, given.lengths, clean
        )
        return logits

    return call


def _vllm_kernels(shape: Shape) -> dict[str, _Select]:
    ops = torch.ops._C
    out = torch.empty(shape.rows, TOPK, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(_VLLM_WORKSPACE, dtype=torch.uint8, device="cuda")
    starts = torch.zeros(shape.rows, dtype=torch.int32, device="cuda")

    def by_row(logits: Tensor, lengths: Tensor) -> None:
        ops.top_k_per_row_prefill(logits, starts, lengths, out, shape.rows, *logits.stride(), TOPK)

    def persistent(logits: Tensor, lengths: Tensor) -> None:
        lengths = lengths.view(shape.requests, -1) if not shape.prefill else lengths
        ops.persistent_topk(logits, lengths, out, workspace, TOPK, shape.keys)

    return {"top_k_per_row_prefill": by_row, "persistent_topk": persistent}


def _time(calls: Sequence[Call], shape: Shape) -> float:
    work = shape.rows * shape.keys
    if work > 1 << 28:
        calls = calls[:1]
    return round(time_us(calls, repetitions=4 if work > 1 << 24 else 8), 2)


def _peak_bytes(call: Call) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
