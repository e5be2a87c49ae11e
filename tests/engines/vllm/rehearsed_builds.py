"""What a rehearsal compiles before it runs, and while: ``rehearsed_builds.py ANSWER.json``.

On the model of ``host_calls.py``, by a machine that says it is an H200. Nothing is compiled: builds
are what Triton would be asked for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import host_calls
import pretended
import torch

from anymla.ops.device import TARGETS
from anymla.testing import empty_kernels
from lab.launches import pretended_device

MOST_TOKENS, MOST_REQUESTS, LONGEST = 2048, 24, 16384


def main(answer: Path) -> None:
    """Rehearse; write builds and launches of each pass."""
    from anymla.engines.vllm.warm_up import Rehearsal

    builds: list[str] = []

    class Noted(empty_kernels.EmptyKernel):
        def __init__(self, source: Any, launched: Any) -> None:
            builds.append(source.fn.__name__)
            super().__init__(source, launched)

    empty_kernels.EmptyKernel = Noted  # type: ignore[misc]
    with (
        tempfile.TemporaryDirectory() as place,
        pretended_device(TARGETS["sm_90"]),
        host_calls.pretended_workspace(),
        empty_kernels.empty_kernels() as launches,
    ):
        step = host_calls.Step(Path(place))
        step.config.scheduler_config.max_num_seqs = MOST_REQUESTS
        step.config.scheduler_config.max_num_batched_tokens = MOST_TOKENS
        step.config.model_config.max_model_len = LONGEST
        rehearsal, passes = Rehearsal(step.model, step.config), []
        inner, run = step.model.model, rehearsal.steps

        def steps() -> None:
            builds.clear()
            launches.clear()
            run()
            launched = sum(launches.values())
            layers = len(inner.layers)
            passes.append({"builds": list(builds), "launches": launched, "layers": layers})

        firsts = first_runs(step, rehearsal, builds, launches)
        rehearsal.steps = steps
        rehearsal.run()
        layers = inner.start_layer, inner.end_layer, len(inner.layers)
        again = marked(rehearsal, passes)
        others = purposes(step)
    found = {"passes": passes[:2], "layers": layers, "again": again, "purposes": others}
    found["firsts"] = firsts
    answer.write_text(json.dumps(found))


def first_runs(
    step: Any, rehearsal: Any, builds: list[str], launches: dict[Any, int]
) -> list[dict[str, Any]]:
    """Builds and launches before the model's first call, in it, and in the second call."""
    bare, found = type(rehearsal).bare_steps, []

    def noted(run: Any) -> None:
        builds.clear()
        launches.clear()
        run()
        found.append({"builds": list(builds), "launches": sum(launches.values())})
        builds.clear()
        launches.clear()

    def call() -> None:
        positions = torch.zeros(MOST_TOKENS, dtype=torch.int64, device="meta")
        inputs = SimpleNamespace(metadata=None, positions=positions)
        with rehearsal._context(MOST_TOKENS, inputs):
            step.model(input_ids=positions.int(), positions=positions)

    with mock.patch.object(type(rehearsal), "bare_steps", lambda own: noted(lambda: bare(own))):
        noted(call)
        noted(call)
    return found


def marked(rehearsal: Any, passes: list[Any]) -> dict[str, Any]:
    """Rehearse where a mark is valid on this rank, and where it is so on all."""
    from anymla.engines.vllm import warm_up

    given: list[torch.Tensor] = []
    found = {}
    for here, elsewhere in ((True, True), (True, False), (False, True)):
        count = len(passes)

        def agree(flag: torch.Tensor, op: Any, elsewhere: bool = elsewhere) -> None:
            given.append(flag)
            flag.mul_(elsewhere)

        group = mock.Mock(get_world_size=lambda: 2, get_rank=lambda: 0, all_reduce=agree)
        with (
            mock.patch.object(warm_up.CompileMark, "is_valid", return_value=here),
            mock.patch.object(warm_up, "distributed", group),
            mock.patch.object(warm_up.torch, "tensor", lambda value, **_: torch.Tensor([value])),
        ):
            rehearsal.run()
        found[f"{here} {elsewhere}"] = len(passes) - count
    return found | {"asked": len(given)}


def purposes(step: Any) -> dict[str, bool]:
    """Changes to an engine, and whether its kernels then are another purpose."""
    from anymla.engines.vllm.warm_up import Rehearsal

    config, layer = step.config, step.model.model.layers[2]
    scheduler, cache = config.scheduler_config, layer.attn.swa_cache_layer

    def purpose() -> Any:
        return json.dumps(Rehearsal(step.model, config).purpose())

    before = purpose()
    rows = torch.empty_strided(
        (cache.kv_cache.shape[0] + 16, *cache.kv_cache.shape[1:]),
        cache.kv_cache.stride(),
        dtype=cache.kv_cache.dtype,
        device="meta",
    )
    norm = layer.attn_norm.weight
    other = type("Other", (type(layer.ffn),), {})
    changes = {
        "nothing": (scheduler, "max_num_seqs", MOST_REQUESTS),
        "16 pages more": (cache, "kv_cache", rows),
        "a page more": (cache, "kv_cache", rows[1:]),
        "another page": (cache, "kv_cache", cache.kv_cache.transpose(0, 1)),
        "requests": (scheduler, "max_num_seqs", 25),
        "tokens": (scheduler, "max_num_batched_tokens", 2047),
        "context": (config.model_config, "max_model_len", LONGEST + 1),
        "a number of the model": (config.model_config.hf_config, "swiglu_limit", 3.0),
        "the model's place": (config.model_config.hf_config, "_name_or_path", "elsewhere"),
        "a weight's strides": (norm, "data", norm.data.repeat(2)[::2]),
        "a layer's class": (layer.ffn, "__class__", other),
        "ranks": (config.parallel_config, "enable_expert_parallel", True),
    }
    found = {}
    for name, (owner, attribute, value) in changes.items():
        kept = getattr(owner, attribute)
        setattr(owner, attribute, value)
        found[name] = purpose() != before
        setattr(owner, attribute, kept)
        assert purpose() == before, name
    return found


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    pretended.pretend()
    main(Path(sys.argv[1]))
