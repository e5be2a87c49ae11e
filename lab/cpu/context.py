"""Growth of a decode step's time with the context.

Reading a prompt of 64k tokens only to fill the caches would take most of the time, so the pages
are taken as if it had been read, and filled with random valid rows.
"""

from __future__ import annotations

from pathlib import Path

import torch

from anymla.bench.random_caches import fill_randomly
from anymla.bench.report import Result
from anymla.model.transformer import Transformer
from anymla.runtime.engine import Engine
from anymla.runtime.request import Request
from lab.cpu.tiny_model import engine_with, load, prompt, tiny
from lab.timing import interleaved, median, milliseconds

PART = "decode step against context, tiny model, bf16, FP8 cache"
CONTEXTS = tuple(1024 << i for i in range(7))
_CHUNK = 512
_STEPS = 24


def context_curve(directory: Path, contexts: tuple[int, ...], rounds: int) -> list[Result]:
    """Measure the median decode step at each context length, contexts in turns."""
    model = load(tiny(directory), torch.bfloat16)
    engines = {length: filled_engine(model, length, rounds) for length in contexts}
    steps = {str(length): engine.step for length, engine in engines.items()}
    times = interleaved(steps, rounds=rounds, block=_STEPS // 4, warm_up=2)
    first = median(times[str(contexts[0])])
    return [
        Result(
            PART,
            f"{length} tokens",
            {
                **milliseconds(times[str(length)], "decode_ms"),
                "times_first": median(times[str(length)]) / first,
                "cache_mb": engines[length].store.nbytes / 1e6,
                "caches": "random valid rows",
            },
        )
        for length in contexts
    ]


def filled_engine(model: Transformer, length: int, rounds: int) -> Engine:
    """Make an engine whose one request is about to run the last of ``length`` prompt tokens."""
    new = rounds * _STEPS + 8
    request = Request("bench", prompt(model, length), max_new_tokens=new)
    engine = engine_with(model, request, "fp8")
    state = engine.state("bench")
    engine.scheduler.next_spans()  # admits the request
    tables = engine.store.tables.values()
    for computed in [*range(_CHUNK, length - 1, _CHUNK), length - 1]:
        for table in tables:
            table.extend(state.row, computed)
        state.computed = computed
        engine.store.slide(state)
    fill_randomly(engine.store)
    engine.step()
    assert not state.is_prefill
    return engine
