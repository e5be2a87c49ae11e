"""A worker that rehearses its steps: ``rehearsed.py ANSWER.json``."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from inputs import bf16_twin, prompt_of

from anymla.testing.tiny_checkpoint import TinyOptions

MOST_TOKENS = 130  # of a rehearsed step
PROMPT, NEW_TOKENS = 100, 4


class Worker:
    """Methods that vLLM adds to its worker."""

    def rehearse(self) -> dict[str, Any]:
        """Rehearse, while calls of operations are noted with the length of their first tensor."""
        from anymla.engines.vllm import warm_up
        from anymla.ops.registry import Operation

        model = self.model_runner.get_model()
        caches = [cache.clone() for cache in self._caches(model)]
        shapes: set[Any] = set()
        run = Operation.__call__

        def noted(operation: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()))
            shapes.add((operation.name, len(first)))
            return run(operation, *args, **kwargs)

        with mock.patch.object(Operation, "__call__", noted):
            rehearsal = warm_up.Rehearsal(model, self.vllm_config)
            rehearsal.most_tokens = MOST_TOKENS
            rehearsal.run()
        warmup = warm_up._Warmup(warm_up.Rehearsal(model, self.vllm_config))
        broken = mock.patch.object(warm_up.Rehearsal, "run", side_effect=AttributeError("moved"))
        with broken, mock.patch.object(warm_up._LOG, "exception") as logged:
            warmup.compile(0)
            warmup.rehearsal.config = SimpleNamespace(
                parallel_config=SimpleNamespace(world_size=1, world_size_across_dp=2)
            )
            stops = contextlib.suppress(AttributeError)
            with stops:
                warmup.compile(0)
                stops = None
        shared = _bytes_of_metadata(warm_up)
        same = all(map(_equal, caches, self._caches(model)))
        return {
            "calls": sorted(shapes),
            "caches_are_as_they_were": same,
            "bytes": shared,
            "stops_beside_others": stops is not None,
            "said": [str(call.args[0]) for call in logged.call_args_list],
            "left_out": _left_out(warm_up),
            "registered": _registered(warm_up, self.vllm_config),
        }

    def _caches(self, model: Any) -> list[Any]:
        caches = []
        for layer in model.modules():
            if hasattr(layer, "swa_cache_layer"):
                caches += [layer.swa_cache_layer.kv_cache, layer.kv_cache]
                for compressor in (layer.compressor, getattr(layer.indexer, "compressor", None)):
                    if compressor is not None:
                        caches.append(compressor.state_cache.kv_cache)
                if layer.indexer is not None:
                    caches.append(layer.indexer.k_cache.kv_cache)
        return [cache for cache in caches if cache is not None and cache.numel()]


def _registered(warm_up: Any, config: Any) -> list[Any]:
    """What vLLM compiles at the start of a server on a GPU, and what precedes the model's calls."""
    import torch
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    registry = JitWarmupRegistry(config)
    hooks: list[Any] = []
    model = SimpleNamespace(
        parameters=lambda: iter([torch.empty(0, device="meta")]),
        register_forward_pre_hook=hooks.append,
    )
    with (
        registry.activate(),
        mock.patch.object(warm_up, "Rehearsal"),
        mock.patch.object(config.kernel_config, "enable_jit_warmup", True),
    ):
        warm_up.register(model, config)
    names = [type(kernel).__name__ for kernel in registry._registrations]
    return [*names, len(hooks)]


def _left_out(warm_up: Any) -> list[float]:
    """What DeepGEMM's products give while they are left out; they are there again afterwards."""
    import torch
    from vllm.utils import deep_gemm

    product, einsum = torch.ones(2, 3), torch.ones(2, 3)
    pair = product, product
    with (
        mock.patch.object(deep_gemm, "_fp8_gemm_nt_impl", side_effect=AssertionError) as first,
        mock.patch.object(deep_gemm, "_fp8_einsum_impl", side_effect=AssertionError) as second,
    ):
        with warm_up._without_deep_gemm():
            deep_gemm.fp8_gemm_nt(pair, pair, product, is_deep_gemm_e8m0_used=False)
            deep_gemm.fp8_einsum("bhr,hdr->bhd", pair, pair, einsum, recipe=(1, 128, 128))
        assert deep_gemm._fp8_gemm_nt_impl is first
        assert deep_gemm._fp8_einsum_impl is second
    return [product.sum().item(), einsum.sum().item()]


def _bytes_of_metadata(warm_up: Any) -> int:
    """Of a step of V4-Flash's layers, 8,192 tokens after a million."""
    import torch

    layers = []
    for number, ratio in enumerate((0, 0, *(4, 128) * 20, 4)):
        names = iter(range(10))

        def cache(number: int = number, names: Any = names) -> Any:
            return SimpleNamespace(prefix=f"{number}.{next(names)}")

        pool = SimpleNamespace(state_cache=cache()) if ratio else None
        chooser = SimpleNamespace(k_cache=cache(), compressor=SimpleNamespace(state_cache=cache()))
        layers.append(
            SimpleNamespace(
                attn_sink=torch.empty(64, device="meta"),
                window_size=128,
                compress_ratio=ratio,
                prefix=f"{number}",
                swa_cache_layer=cache(),
                compressor=pool,
                indexer=chooser if ratio == 4 else None,
            )
        )
    step = warm_up._Decodes(layers, 8192, 1 << 20)
    by_storage = {}
    for metadata in step.metadata.values():
        for value in vars(metadata).values():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                by_storage[storage._cdata] = storage.nbytes()
    return sum(by_storage.values())


def _equal(before: Any, after: Any) -> bool:
    return bool((before == after).all())


def run(checkpoint: Path) -> dict[str, Any]:
    """The same prompt before and after."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        max_model_len=4096,
        max_num_seqs=6,
        worker_extension_cls="rehearsed.Worker",
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def tokens() -> list[int]:
        given = {"prompt_token_ids": prompt_of(PROMPT)}
        return list(llm.generate([given], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    before = tokens()
    (found,) = llm.collective_rpc("rehearse")
    return found | {"before": before, "after": tokens()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        answer = run(bf16_twin(Path(directory), TinyOptions()))
    Path(sys.argv[1]).write_text(json.dumps(answer))
