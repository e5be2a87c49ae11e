"""Scores and selection on a GPU, next to DeepGEMM's scores with other top-k kernels.

All in one process, CUDA-graph replay over rotating inputs, medians. 64 heads of 128 channels, FP8
keys in pages of 64, k = 512. A decode is next_n queries a request over all of its keys; a prefill
is the last queries of one request, each seeing the keys before it (ratio 4).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anymla.bench.gpu_timing import copies_for, time_us
from anymla.bench.indexer_cases import (
    TOPK,
    WIDTH,
    Inputs,
    Pool,
    pages_needed,
)
from anymla.bench.indexer_peers import (
    Scores,
    Select,
    decode_scores,
    prefill_scores,
    vllm_kernels,
)
from anymla.bench.report import Result
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import select_topk
from anymla.ops.indexer.shapes import SelectShape

Call = Callable[[], object]
# The modules of ops.indexer that have a backend's scores.
SCORES = {"triton": "triton_scores", "gluon_sm90": "gluon_sm90_launch"}


def run(
    shapes: Sequence[SelectShape], backends: Sequence[str], topk_library: Path | None = None
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


def _usable(backend: str, shape: SelectShape, given: Inputs) -> bool:
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


def _ours(backend: str, shape: SelectShape, sets: list[Inputs]) -> dict[str, Any]:
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


def score_only(backend: str, given: Inputs, shape: SelectShape) -> None:
    """The scores of a selection without the top-k, in its own chunks."""
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
        sm_count=target.sm_count,
        scratch_bytes=SCRATCH_BYTES,
        histograms=backend == "gluon_sm90",
    )
    columns = padded_entries(shape.keys)
    scores = torch.empty(config.chunk, columns, device=device)
    maxima = None
    if config.algorithm == "groups":
        maxima = torch.empty(config.chunk, columns // GROUP, dtype=torch.int32, device=device)
    inputs = select_inputs(
        given.q, None, given.weights, given.cache, INDEX_FP8, given.table, given.lengths, None,
        None, shape.keys, TOPK,
    )  # fmt: skip
    for first in range(0, shape.rows, config.chunk):
        write_scores(inputs.chunk(slice(first, first + config.chunk)), scores, maxima, target)


def _peers(
    deep_gemm: Any, shape: SelectShape, sets: list[Inputs], with_vllm: bool
) -> dict[str, Any]:
    """DeepGEMM's scores alone, with torch.topk, and with vLLM's kernels."""
    scores = prefill_scores if shape.prefill else decode_scores
    calls = [scores(deep_gemm, shape, given) for given in sets]

    def with_torch(call: Scores) -> object:
        return call(True).topk(TOPK, dim=-1)

    def with_kernel(select: Select, call: Scores, given: Inputs) -> object:
        return select(call(False), given.lengths)

    torch_calls = [partial(with_torch, call) for call in calls]
    values: dict[str, Any] = {
        "deep_gemm_us": _time([partial(call, False) for call in calls], shape),
        "topk_us": _time(torch_calls, shape),
        "topk_mb": round(_peak_bytes(torch_calls[0]) / 1e6, 1),
    }
    if with_vllm:
        times = {}
        for name, select in vllm_kernels(shape).items():
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


def _time(calls: Sequence[Call], shape: SelectShape) -> float:
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
