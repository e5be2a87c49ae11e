"""Decode steps of a whole model of real size, random weights: replayed, and launched one by one."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from anymla.bench.gpu_timing import GraphClock, sums
from anymla.bench.layer_setup import MODELS
from anymla.bench.random_caches import fill_randomly
from anymla.bench.random_weights import RandomWeights
from anymla.bench.report import Result
from anymla.layers.ranks import ALONE, Ranks
from anymla.layers.step import Step
from anymla.model.build import Builder, Ngrams
from anymla.model.config import EngramConfig, ModelConfig
from anymla.model.transformer import Transformer
from anymla.ops.compile_ahead import compiled_together
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch, BatchSizes, device_step
from anymla.runtime.engine import Engine
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.options import DecodeMode, EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import best_tokens
from anymla.runtime.scoring import token_logprobs
from anymla.testing.published import FLASH_41
from lab.kernel_files import family_of
from lab.timing import median, microseconds

WHOLE: dict[str, dict[str, Any]] = MODELS | {"flash-41": FLASH_41}
PART = "whole model, random weights, decode step"
# Before times are taken: they compile what is left to compile, record, and warm up.
_FIRST_STEPS = 4


# Hashes of n-grams are taken modulo primes from here on, where they are in a random model: tables
# have 12 MB each, of which as many rows are read as of those of 100 GB.
_BUCKETS = 1000


def random_model(
    model: str,
    device: torch.device,
    *,
    layers: int,
    experts: int,
    changes: dict[str, object],
    ngrams: bool = False,
) -> Transformer:
    """Make the first layers of a model, with few experts and without draft layers."""
    published = WHOLE[model]
    text = published.get("text_config", published)
    values = text | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "compress_ratios": text["compress_ratios"][:layers],
        "num_hash_layers": min(layers, text.get("num_hash_layers", 0)),
        "n_routed_experts": experts,
    }
    if text is not published:
        values = published | {"text_config": _shared_values(values, layers, ngrams) | changes}
        changes = {}
    return random_transformer(ModelConfig.from_dict(values | changes), device)


def random_transformer(
    config: ModelConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
    share_channels: bool | None = None,
) -> Transformer:
    """Make a rank's share of a model of random weights.

    Args:
        config: configuration of the model.
        device: device that holds the weights.
        ranks: processes that share the model.
        dtype: dtype of the activations.
        seed: the model is the same for any ranks if they give one seed; None for torch's generator.
        share_channels: True to share each expert's channels, False to share whole experts; None
            for what an engine does.
    """
    weights, engram = RandomWeights(config, device, seed=seed), config.engram
    ngrams = None
    if engram is not None:
        ngrams = Ngrams(torch.arange(config.vocab_size) % engram.tokens, weights.table)
    return Builder(
        config,
        weights.tensor,
        weights.linear,
        dtype=dtype,
        device=device,
        backend=None,
        ranks=ranks,
        ngrams=ngrams,
        share_channels=share_channels,
    ).transformer()


def _shared_values(values: dict[str, Any], layers: int, ngrams: bool) -> dict[str, Any]:
    """Return V4.1's configuration fields for its first layers."""
    kept = {k: v for k, v in values.items() if not k.startswith("dspark_")}
    sources = {
        name: [layer for layer in kept[name] if layer < layers]
        for name in ("kv_source_layer_ids", "index_source_layer_ids")
    }
    candidates = kept["candidate_source_layer_id"]
    keeps = {"candidate_source_layer_id": candidates if candidates < layers else -1}
    reading = [layer for layer in kept["engram_layer_ids"] if layer < layers] if ngrams else []
    engram = EngramConfig(
        layer_ids=tuple(reading),
        rows=(),
        max_ngram=kept["engram_max_ngram_size"],
        buckets=_BUCKETS,
        heads=kept["engram_n_heads"],
        head_dim=kept["engram_head_dim"],
        pad_token=kept["engram_pad_token_id"],
        tokens=kept["engram_compressed_vocab_size"],
    )
    tables = {
        "engram_layer_ids": reading,
        "engram_num_embeddings": list(engram.filled_rows),
        "engram_vocab_size": engram.buckets,
    }
    return kept | sources | keeps | tables


def decode_steps(
    model: Transformer,
    label: str,
    batches: tuple[int, ...],
    modes: tuple[DecodeMode, ...],
    *,
    context: int = 4096,
    steps: int = 32,
    kv_cache: str = "fp8",
) -> Iterator[Result]:
    """Measure the wall time of steps, including the choice of tokens."""
    timed: list[tuple[Engine, Result]] = []
    for batch in batches:
        wanted: list[list[int]] = []
        for mode in modes:
            start = time.perf_counter()
            engine = engine_at(model, batch, context, _FIRST_STEPS + steps, mode, kv_cache=kv_cache)
            _compile_ahead(model, engine.store, batch, engine.options.max_seq_len)
            times, _ = timed_steps(engine, _FIRST_STEPS, steps)
            elapsed = time.perf_counter() - start
            tokens = [engine.state(str(number)).generated for number in range(batch)]
            wanted = wanted or tokens
            same = sum(map(list.__eq__, tokens, wanted))
            exact = mode != "plain"
            result = Result(
                PART,
                f"{label}, batch {batch}, context {context}, {mode}",
                {
                    **microseconds(times),
                    "tokens_per_s": round(batch / median(times), 1),
                    "same_tokens": f"{same} of {batch}",
                    "all_s": round(elapsed, 1),
                },
                target=f"the tokens of {modes[0]}" if exact else None,
                met=same == batch if exact else None,
            )
            timed.append((engine, result))
    while timed:
        engine, result = timed.pop(0)
        result.values.update(_kernels(engine))
        yield result


def engine_at(
    model: Transformer,
    batch: int,
    context: int,
    steps: int,
    mode: DecodeMode,
    *,
    draft_tokens: int = 0,
    kv_cache: str = "fp8",
) -> Engine:
    """Make an engine with random caches, whose requests all decode next."""
    longest = context + (steps + 4) * (1 + draft_tokens)
    engine = Engine(
        model,
        EngineOptions(
            max_requests=batch,
            max_seq_len=longest,
            chunk_size=1,
            decode=mode,
            draft_tokens=draft_tokens,
            kv_cache=kv_cache,
        ),
    )
    fill_randomly(engine.store, seed=0)
    vocabulary = range(2, model.config.vocab_size)
    for number in range(batch):
        prompt = tuple(random.Random(number).choices(vocabulary, k=context))
        engine.submit(Request(str(number), prompt, max_new_tokens=longest - context))
        state = engine.state(str(number))
        state.tokens.append(2 + number)
        state.computed = context
    engine.scheduler.next_spans()  # admits them
    for number in range(batch):
        state = engine.state(str(number))
        engine.store.slide(state)
        for table in engine.store.tables.values():
            table.extend(state.row, context)
    return engine


@torch.inference_mode()
def _compile_ahead(model: Transformer, store: CacheStore, batch: int, max_seq_len: int) -> None:
    """Compile the kernels of a decode step in parallel, where there are any to compile."""
    device = store.device
    if device.type == "cpu":
        return
    with compiled_together() as only_compiled:
        if not only_compiled:
            return
        step = padding_step(model, store, batch, max_seq_len)
        hidden = model.forward(step, store.layers, only=model.kinds_of_layers())
        logits = model.logits(hidden)
        token_logprobs(logits, best_tokens(logits))


def padding_step(model: Transformer, store: CacheStore, batch: int, max_seq_len: int) -> Step:
    """Make a decode step of ``batch`` tokens that belong to no request."""
    device = store.device
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    nobody = torch.zeros(batch, dtype=torch.int32, device=device)
    absent = torch.full((batch,), store.absent_row, device=device)
    tables = {
        group.name: store.tables[group.name].rows(absent, max_seq_len) for group in store.groups
    }
    step = device_step(
        Batch(nobody, rows, nobody, nobody, tables),
        store.groups,
        BatchSizes((1,) * batch, batch, max_seq_len),
        backend="torch",  # what tensors are indexed with must be right
    )
    ngrams = NgramReader(model.engrams, device).nothing(batch)
    return dataclasses.replace(step, ngrams=ngrams)


def _kernels(engine: Engine) -> dict[str, object]:
    """Count a step's launches, and sum the us of its kernels by family."""
    if engine.store.device.type == "cpu":
        return {}
    kernels = GraphClock().kernel_times(engine.step)
    return {
        "launches": len(kernels),
        "parts_us": sums((family_of(name), taken) for name, taken in kernels),
    }


def timed_steps(engine: Engine, first: int, count: int) -> tuple[list[float], int]:
    """Return the seconds of ``count`` steps after ``first`` others, and the number of tokens."""
    for _ in range(first):
        engine.step()
    wait(engine.model.device)
    times, tokens = [], 0
    for _ in range(count):
        start = time.perf_counter()
        report = engine.step()
        times.append(time.perf_counter() - start)
        tokens += sum(map(len, report.new_tokens.values()))
    return times, tokens


def wait(device: torch.device) -> None:
    """Wait for everything that was launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
