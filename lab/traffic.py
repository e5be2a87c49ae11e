"""Random traffic for many steps, which must compile nothing new and keep memory constant."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anymla.bench.report import Result
from anymla.model.load import load_model
from anymla.ops.device import has_triton
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import Sampling
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

PART = "random traffic"
_LONGEST = 320
_PROMPTS, _OUTPUTS = (1, 3, 17, 64, 130), (1, 8, 60, 180)
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of the device's memory: in tensors, and taken from the device."""

    allocated: int
    reserved: int

    @classmethod
    def now(cls, device: torch.device) -> Held:
        """Measure what is held while nothing runs."""
        if device.type != "cuda":
            return cls(0, 0)
        torch.cuda.synchronize(device)
        gc.collect()
        return cls(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def run(
    directory: Path, device: torch.device, *, steps: int, seconds: float = float("inf")
) -> Iterator[Result]:
    """Warm up a tiny model with drafts, then serve random requests.

    Args:
        directory: empty directory that the checkpoint is written to.
        device: device that the model runs on.
        steps: least number of engine steps.
        seconds: stop earlier after so long, warm-up included.

    Yields:
        A result every thousand steps, and the last one.
    """
    # As many index heads as Hopper's kernels take.
    tiny = TinyOptions(ratios=(4, 128), experts=16, index_topk=16, index_heads=64)
    write_tiny_checkpoint(directory, tiny)
    model = load_model(directory, device=device, progress=False)
    options = EngineOptions(
        max_requests=2,
        max_seq_len=_LONGEST,
        chunk_size=32,
        draft_tokens=1,
        decode="graph" if device.type == "cuda" else "fixed",
    )
    engine = Engine(model, options)
    start = time.perf_counter()
    engine.warm_up()
    warmed = time.perf_counter() - start
    with _compilations() as compiled:
        yield from _served(engine, device, steps, seconds - warmed, warmed, compiled)


def _served(
    engine: Engine,
    device: torch.device,
    steps: int,
    seconds: float,
    warmed: float,
    compiled: list[str],
) -> Iterator[Result]:
    rng = random.Random(0)
    start = time.perf_counter()
    done = requests = tokens = 0
    held: Held | None = None
    told = 0
    while done < steps and time.perf_counter() - start < seconds:
        given = _requests(rng, requests)
        requests += len(given)
        for new in _wave(engine, given, rng):
            done += 1
            tokens += new
        now = Held.now(device)
        held = held or now
        last = done >= steps or time.perf_counter() - start >= seconds
        if last or done >= told + 1000:
            told = done
            elapsed = time.perf_counter() - start
            yield Result(
                PART,
                f"tiny model, drafts, {engine.options.decode}",
                {
                    "steps": done,
                    "requests": requests,
                    "tokens": tokens,
                    "compiled": len(compiled),
                    "allocated_mib": [held.allocated / _MIB, now.allocated / _MIB],
                    "reserved_mib": [held.reserved / _MIB, now.reserved / _MIB],
                    "warm_up_s": round(warmed, 1),
                    "steps_per_s": round(done / elapsed, 1),
                },
                target="nothing compiled, and no more memory than after the first requests",
                met=not compiled
                and now.allocated <= held.allocated
                and now.reserved <= held.reserved,
            )


def _requests(rng: random.Random, first: int) -> list[Request]:
    return [
        Request(
            str(first + number),
            tuple(rng.choices(range(3, 250), k=rng.choice(_PROMPTS))),
            rng.choice(_OUTPUTS),
            Sampling(rng.choice((0.0, 0.8)), 0.9, number),
        )
        for number in range(6)
    ]


def _wave(engine: Engine, waiting: list[Request], rng: random.Random) -> Iterator[int]:
    """Serve requests that join at random steps; yields the new tokens of every step."""
    while waiting or engine.busy:
        while waiting and (not engine.busy or rng.random() < 0.2):
            engine.submit(waiting.pop(0))
        yield sum(map(len, engine.step().new_tokens.values()))


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """Collect names of the kernels that Triton is asked to compile inside."""
    found: list[str] = []
    if not has_triton():
        yield found
        return
    from triton import knobs

    def note(*_: Any, fn: Any, **__: Any) -> bool:
        found.append(str(fn.name))
        return False  # go on

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before
