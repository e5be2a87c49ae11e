"""A model of published size on all ranks together: memory, steps that verify and draft, sums.

Weights are random, made on the devices in the checkpoint's formats and shared by the ranks as a
checkpoint's are. Their drafts are hardly ever right; a step takes as long as if they were.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from anymla.bench.report import Result
from anymla.layers.ranks import Ranks
from anymla.model.config import ModelConfig
from anymla.model.transformer import Transformer
from anymla.runtime.bucket import Bucket
from anymla.runtime.engine import Engine
from anymla.runtime.graphs import Graph
from anymla.runtime.options import DecodeMode
from anymla.testing.published import FLASH_0731, PRO_0813
from anymla.testing.tiny_options import TinyOptions, tiny_config
from lab.model_steps import engine_at, timed_steps, wait
from lab.step_parts import DRAFT, StepParts, profiled, step_parts
from lab.timing import median, microseconds

MODEL, SUMS, STEP = "full size, model", "full size, sums over ranks", "full size, step"
# "tiny" is what make-tiny writes.
MODELS: dict[str, dict[str, Any]] = {
    "flash-0731": FLASH_0731,
    "pro-0813": PRO_0813,
    "tiny": tiny_config(TinyOptions(ratios=(0, 4, 128, 4), drafter="dspark")),
}
_FIRST_STEPS, _PROFILED = 3, 4
_SUMS_IN_GRAPH, _REPLAYS = 64, 10


def drafting_config(
    model: str, *, layers: int | None = None, experts: int | None = None
) -> ModelConfig:
    """Return the configuration of a model with its DSpark drafter."""
    values = MODELS[model]
    published = values["num_hidden_layers"]
    count = min(layers or published, published)
    stages = len(values["compress_ratios"]) - published
    taps = len(values["dspark_target_layer_ids"])
    return ModelConfig.from_dict(
        values
        | {
            "num_hidden_layers": count,
            "compress_ratios": [*values["compress_ratios"][:count], *[0] * stages],
            "dspark_target_layer_ids": list(range(count))[-taps:],
            "num_hash_layers": min(count, values["num_hash_layers"]),
            "n_routed_experts": experts or values["n_routed_experts"],
        }
    )


def model_made(make: Callable[[], Transformer], label: str) -> tuple[Transformer, Result]:
    """Make a model; return it, the time that took, and the memory of the fullest rank."""
    begin = time.perf_counter()
    model = make()
    wait(model.device)
    elapsed = time.perf_counter() - begin
    parameters = _nbytes(model)
    values = {
        "make_s": round(elapsed, 1),
        "weights_gb": _most(parameters / 1e9, model),
        **_taken(model),
    }
    return model, Result(MODEL, label, values)


def sums_over_ranks(model: Transformer, rows: Sequence[int]) -> Iterator[Result]:
    """Measure an all-reduce of some rows of activations in us, many in one graph."""
    ranks, device = model.ranks, model.device
    ways = {"group": dataclasses.replace(ranks, peers=None)}
    if ranks.peers is not None:
        ways["one_shot"] = ranks
    for count in rows:
        values: dict[str, Any] = {}
        for name, way in ways.items():
            x = torch.randn(count, model.config.hidden_size, dtype=model.dtype, device=device)
            graph = Graph(
                functools.partial(_many_sums, way, x), device, record=device.type == "cuda"
            )
            values[f"{name}_us"] = round(_time(graph, device) / _SUMS_IN_GRAPH * 1e6, 2)
            if name == "one_shot" and not (ranks.peers and ranks.peers.takes(x)):
                values["one_shot_us"] = None
        yield Result(SUMS, f"{ranks.size} ranks, {count} rows", values)


def steps(
    model: Transformer,
    label: str,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    draft_tokens: int,
    mode: DecodeMode,
    kv_cache: str,
    count: int,
    bar_us: float | None = None,
) -> Iterator[Result]:
    """Measure a step that verifies all drafts and makes the next, and one without drafts.

    Both are wall times.
    """
    exact = model.dtype == torch.float32
    for context in contexts:
        for batch in batches:
            found = {}
            for drafts in (draft_tokens, 0):
                engine = engine_at(
                    model,
                    batch,
                    context,
                    _FIRST_STEPS + count + _PROFILED + 1,
                    mode,
                    draft_tokens=drafts,
                    kv_cache=kv_cache,
                )
                found[drafts] = _measured(engine, batch, count)
                del engine
            values, texts = found[draft_tokens]
            plain, plain_texts = found[0]
            same = sum(
                all(a == b for a, b in zip(*pair, strict=False))
                for pair in zip(texts, plain_texts, strict=True)
            )
            values |= {
                "plain_us": plain["us"],
                "plain_parts_us": plain.get("parts_us"),
                "same_texts": f"{same} of {batch}",
            }
            target, met = None, None
            if exact:
                target, met = "texts with drafts and without are equal", same == batch
            elif bar_us is not None and batch == 1:
                target, met = f"<= {bar_us:.0f} us", values["us"] <= bar_us
            case = f"{label}, batch {batch}, context {context}, {1 + draft_tokens} rows, {mode}"
            yield Result(STEP, case, values, target, met)


def _measured(engine: Engine, batch: int, count: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Return times of an engine's steps, and the texts."""
    model, drafts = engine.model, engine.options.draft_tokens
    begin = time.perf_counter()
    engine.warm_up(only=functools.partial(_wanted, engine, batch))
    ready = time.perf_counter() - begin
    times, tokens = timed_steps(engine, _FIRST_STEPS, count)
    values: dict[str, Any] = {
        **microseconds(times),
        "tokens_a_step": round(tokens / batch / count, 2),
        "warm_up_s": round(ready, 1),
    }
    found = _parts(engine, drafts=drafts > 0)
    if found is not None:
        values |= {
            "launches": round(found.launches),
            "profiled_us": round(found.us, 1),
            "draft_us": found.parts.get(DRAFT),
            "parts_us": found.parts,
            "draft_parts_us": found.draft_parts or None,
        }
    values |= {
        "caches_gb": _most(engine.store.nbytes / 1e9, model),
        "workspace_gb": _most(engine.workspace.num_bytes / 1e9, model),
        **_taken(model),
    }
    return values, [engine.state(str(number)).generated for number in range(batch)]


def _wanted(engine: Engine, batch: int, bucket: Bucket) -> bool:
    return bucket.requests == batch and bucket.max_seq_len == engine.options.max_seq_len


def _parts(engine: Engine, *, drafts: bool) -> StepParts | None:
    if engine.model.device.type != "cuda":
        return None
    if engine.model.ranks.rank:  # one profiler is enough; all take the same steps
        for _ in range(_PROFILED + 1):
            engine.step()
        return None
    return step_parts(profiled(engine.step, _PROFILED), _PROFILED, drafts=drafts)


@torch.inference_mode()
def _many_sums(ranks: Ranks, x: Tensor) -> tuple[Tensor, ...]:
    for _ in range(_SUMS_IN_GRAPH):
        ranks.total(x)
    return (x,)


def _time(graph: Graph, device: torch.device) -> float:
    """Return the median seconds of a replay."""
    graph()
    times = []
    for _ in range(_REPLAYS):
        wait(device)
        start = time.perf_counter()
        graph()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _nbytes(model: Transformer) -> int:
    """Return the bytes of all tensors that a model holds, each counted once."""
    seen: dict[int, int] = {}

    def add(value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for each in value:
                add(each, depth)
        elif dataclasses.is_dataclass(value) and depth:
            for field in dataclasses.fields(value):
                add(getattr(value, field.name), depth - 1)

    for module in model.modules():
        for value in vars(module).values():
            add(value, 2)
    return sum(seen.values())


def _taken(model: Transformer) -> dict[str, float]:
    """Return the gigabytes of the fullest rank, with everything of this process on its device."""
    device = model.device
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gb": _most(torch.cuda.memory_allocated(device) / 1e9, model),
        "peak_gb": _most(torch.cuda.max_memory_allocated(device) / 1e9, model),
        "device_gb": _most((total - free) / 1e9, model),
    }


def _most(number: float, model: Transformer) -> float:
    """Return the largest of all ranks' numbers."""
    if model.ranks.size > 1:
        shared = torch.tensor(number, dtype=torch.float32, device=model.device)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        number = float(shared)
    return round(number, 2)
