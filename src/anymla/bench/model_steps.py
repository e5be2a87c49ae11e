"""Decode steps of a whole model of real size, with random weights: replayed, and launched anew."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from anymla.bench.layer_setup import MODELS
from anymla.bench.random_weights import RandomWeights
from anymla.bench.report import Result
from anymla.bench.timing import median, spread
from anymla.model.build import Builder
from anymla.model.config import ModelConfig
from anymla.model.transformer import Transformer
from anymla.runtime.engine import Engine
from anymla.runtime.options import DecodeMode, EngineOptions
from anymla.runtime.request import Request, RequestState

PART = "whole model, random weights, decode step"
_PROMPT, _CONTEXT = 96, 4096


def random_model(
    model: str, device: torch.device, *, layers: int, experts: int, changes: dict[str, object]
) -> Transformer:
    """The first layers of a model, with few experts and without draft layers."""
    published = MODELS[model]
    values = published | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "compress_ratios": published["compress_ratios"][:layers],
        "num_hash_layers": min(layers, published["num_hash_layers"]),
        "n_routed_experts": experts,
    }
    config = ModelConfig.from_dict(values | changes)
    weights = RandomWeights(config, device)
    return Builder(
        config,
        weights.tensor,
        weights.linear,
        dtype=torch.bfloat16,
        device=device,
        backend=None,
    ).transformer()


def decode_steps(
    model: Transformer, label: str, batches: tuple[int, ...], modes: tuple[DecodeMode, ...]
) -> Iterator[Result]:
    """Wall time of steps, choosing tokens included.

    Args:
        model: the model.
        label: for people.
        batches: requests at a time.
        modes: of ``EngineOptions.decode``.
    """
    for batch in batches:
        for mode in modes:
            options = EngineOptions(
                max_requests=batch, max_seq_len=_CONTEXT, chunk_size=512, decode=mode
            )
            engine = Engine(model, options)
            times = _steps(engine, batch)
            low, high = spread(times)
            yield Result(
                PART,
                f"{label}, batch {batch}, {mode}",
                {
                    "ms": round(median(times) * 1e3, 3),
                    "ms_p10": round(low * 1e3, 3),
                    "ms_p90": round(high * 1e3, 3),
                    "tokens_per_s": round(batch / median(times), 1),
                },
            )


def _steps(engine: Engine, batch: int, count: int = 40) -> list[float]:
    """Seconds of decode steps once every request decodes."""
    vocabulary = engine.model.config.vocab_size
    for number in range(batch):
        prompt = tuple(random.Random(number).choices(range(2, vocabulary), k=_PROMPT))
        engine.submit(Request(str(number), prompt, max_new_tokens=count + 16))
    while any(state.is_prefill for state in _states(engine, batch)):
        engine.step()
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def _states(engine: Engine, batch: int) -> list[RequestState]:
    return [engine.state(str(number)) for number in range(batch)]
