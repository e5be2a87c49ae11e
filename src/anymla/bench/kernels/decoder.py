"""A decode layer of V4-Flash's size, and decode steps of a small whole model."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from anymla.bench.layer_setup import LayerSetup
from anymla.bench.runner import Case, Clock, Subject, Values, rounded
from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

RATIOS = (0, 4, 128)
REQUESTS = (1, 8, 64)
STEP_REQUESTS = (1, 8)
_CONTEXT, _EXPERTS = 4096, 8
_PROMPT, _STEPS, _WARM = 150, 32, 4


def cases(
    ratios: Sequence[int] = RATIOS,
    requests: Sequence[int] = REQUESTS,
    step_requests: Sequence[int] = STEP_REQUESTS,
    changes: dict[str, Any] | None = None,
) -> Iterator[Case]:
    """Yield layers of every compression ratio and number of requests, then whole steps.

    Args:
        ratios: compression ratios of the layers' caches: 0 (window alone), 4 or 128.
        requests: numbers of decoding requests in a layer's batch.
        step_requests: numbers of decoding requests in an engine's step.
        changes: fields of the layer's configuration that differ from V4-Flash's.
    """
    for ratio in ratios:
        for count in requests:
            label = f"layer of V4-Flash, ratio {ratio}, {_counted(count)}"
            subjects = functools.partial(_layer, ratio, count, changes or {})
            fields = {"experts": _EXPERTS, "context": _CONTEXT}
            yield Case("decoder", label, subjects, fields, judge=_rounded)
    for count in step_requests:
        label = f"step of a tiny model, {_counted(count)}"
        yield Case("decoder", label, functools.partial(_step, count), judge=_rounded)


def _counted(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'}"


def _rounded(values: Values) -> tuple[Values, None]:
    return rounded(values, {"us": 2}), None


def _layer(ratio: int, requests: int, changes: dict[str, Any], clock: Clock) -> Iterator[Subject]:
    setup = LayerSetup("flash", ratio, clock.device, experts=_EXPERTS, changes=changes)
    batch = setup.batch(requests, _CONTEXT)
    yield Subject("us", [functools.partial(batch.run, layer) for layer in setup.layers])


def _step(requests: int, clock: Clock) -> Iterator[Subject]:
    yield Subject("us", before=lambda: {"us": _step_us(requests, clock.device)})


def _step_us(requests: int, device: torch.device) -> float:
    """Measure the median microseconds of an engine's decode step, with the host's launches."""
    with tempfile.TemporaryDirectory(prefix="anymla-bench-") as folder:
        checkpoint = Path(folder) / "tiny"
        write_tiny_checkpoint(checkpoint, TinyOptions())
        model = load_model(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        random = torch.Generator().manual_seed(0)
        new = _WARM + _STEPS + 1
        batch = [
            Request(
                str(number),
                tuple(torch.randint(2, 250, (_PROMPT,), generator=random).tolist()),
                max_new_tokens=new,
            )
            for number in range(requests)
        ]
        engine = Engine.for_requests(model, EngineOptions(), batch)
        for request in batch:
            engine.submit(request)
        while not all(engine.state(request.request_id).generated for request in batch):
            engine.step()
        taken = []
        while engine.busy:
            began = time.perf_counter()
            engine.step()  # its tokens are read, so the device has finished
            taken.append((time.perf_counter() - began) * 1e6)
    kept = sorted(taken[_WARM:])
    return kept[len(kept) // 2]
