"""What the plugin's layers do on the host in a step without a graph: ``host_calls.py ANSWER.json``.

vLLM's CUDA model at V4-Flash's sizes stands on the meta device of a machine that says it is an H200
(``pretended.py``). Its forward runs with the launchers that run there, and with vLLM's own kernels
left out, so that what is counted and timed is the plugin's. Triton's launches go their whole way,
to a compiled kernel that does nothing.

With ``--times`` microseconds of each method are printed too, the best of many steps; calls of torch
take another time on the meta device than on a GPU, and what CUDA's driver needs is missing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import itertools
import json
import pstats
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pretended
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anymla.ops.device import TARGETS
from anymla.ops.registry import Operation
from anymla.testing.empty_kernels import empty_kernels
from lab.launches import META, pretended_device

LAYERS = 8
RATIOS = [0, 0, 4, 128, 4, 128, 4, 128]
WINDOW_GROUPS = 3  # vLLM 0.32.0 has layers i, i + 3, i + 6 in one group of pages
# Requests that decode, and tokens of the prompt that is prefilled beside them.
STEPS = {"prefill of 1,024": (0, 1024), "8 decodes and 1,024": (8, 1024), "8 decodes": (8, 0)}
CONTEXT = 8192  # of requests that decode


class TorchCalls(TorchDispatchMode):
    """Counts what runs, views aside: kernels that torch would launch, and memory it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def model(directory: Path) -> tuple[Any, Any]:
    """The plugin's model of all parts, and vLLM's configuration."""
    import vllm.models.deepseek_v4.nvidia.model as theirs
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from anymla.engines.vllm import linears

    sizes = pretended.FLASH | {"compress_ratios": RATIOS, "num_hash_layers": 3}
    config = pretended.config_of(sizes, directory)
    pretended.join_alone(config, directory / "store")
    built = pretended.built(config, "meta")
    first = built.model.layers[0]
    if hasattr(first, "hc_attn_fn"):  # the first rank of a pipeline
        first.hc_attn_fn_broadcast = first.hc_attn_fn.data
    for module in built.modules():
        if isinstance(module, linears.DeepseekV4Attention):
            module.aux_stream_list = None
            module._hold_wo_a(module.wo_a)
            module.rotary_emb.cos_sin_cache = module.rotary_emb.cos_sin_cache.float()
            if module.indexer is not None:
                module.indexer_rotary_emb.cos_sin_cache = module.rotary_emb.cos_sin_cache
            module.topk_indices_buffer = module.topk_indices_buffer.to(META)
        if isinstance(module, theirs.DeepseekV4MoE):
            routed = module.experts.routed_experts
            routed.quant_method.process_weights_after_loading(routed)
            module._keep_table(module.gate)
        if isinstance(module, linears.SharedExpert):
            module.act_fn.op = lambda *args: None
        method = getattr(module, "quant_method", None)
        if isinstance(method, linears.Fp8Linear):
            weight, scale = module.weight.data, module.weight_scale_inv.data
            packed = linears.PackedWeight(
                "fp8", weight.view(torch.uint8), linears._bytes_or_float(scale)
            )
            method.held = linears.Linear(packed, quantize_activations=True)
    Fp8LinearMethod.apply = lambda self, layer, x, bias=None: x.new_empty(
        (*x.shape[:-1], layer.weight.shape[0])
    )
    linears.fp8_einsum = lambda *args, **kwargs: None
    linears._has_einsum = lambda: True
    return built, config


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def give_caches(layers: list[Any]) -> None:
    """Pages as vLLM lays them out, each a row of a larger page."""
    pages, stride = 512, 64 * 584 + 64

    def cache(rows: int, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        size = dtype.itemsize
        flat = _empty((pages, stride // size), dtype)
        return flat[:, : rows * width].view(pages, rows, width)

    for layer in layers:
        layer.swa_cache_layer.kv_cache = cache(64, 584)
        if layer.compress_ratio > 1:
            layer.kv_cache = cache(256 // layer.compress_ratio, 584)
        compressors = [layer.compressor]
        if layer.indexer is not None:
            layer.indexer.k_cache.kv_cache = cache(64, 132)
            compressors.append(layer.indexer.compressor)
        for compressor in filter(None, compressors):
            state = compressor.state_cache
            state.kv_cache = cache(state.block_size, state.state_dim, torch.float32)


def metadata(
    layers: list[Any],
    decodes: int,
    prompts: list[tuple[int, int]],
    context: int = CONTEXT,
    longest_model: int = 65536,
    drafts: int = 0,
) -> tuple[dict[str, Any], torch.Tensor]:
    """What vLLM's builders make of a step, and its positions: caches of one kind in groups.

    Args:
        layers: attention layers of the model.
        decodes: number of requests that decode.
        prompts: prefills' numbers of tokens and, the tokens included, lengths.
        context: length of the longest request that decodes.
        longest_model: the model's longest request, after which vLLM sizes its buffers.
        drafts: draft tokens that the first of the requests that decode brings.
    """
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    from anymla.engines.vllm.prefill import StepPlans
    from anymla.ops.attention.plan import decoding_pays

    prompt = sum(tokens for tokens, _ in prompts)
    decoding = decodes + drafts
    tokens, requests = decoding + prompt, decodes + len(prompts)
    longest = max([context] * bool(decodes) + [length for _, length in prompts])
    ints = {"dtype": torch.int32, "device": META}
    lengths = torch.tensor([length for _, length in prompts], dtype=torch.int32)
    queries = torch.tensor([count for count, _ in prompts], dtype=torch.int32)
    counts = [1 + drafts, *[1] * (decodes - 1)][:decodes] + [count for count, _ in prompts]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    seq_lens, to_request = torch.zeros(requests, **ints), torch.zeros(tokens, **ints)
    positions = _empty((tokens,), torch.int64)

    def window() -> Any:
        return DeepseekSparseSWAMetadata(
            block_table=_empty((requests, -(-longest_model // 64)), torch.int32),
            slot_mapping=_empty((tokens,), torch.int64),
            block_size=64,
            seq_lens=seq_lens,
            query_start_loc=starts.to(META),
            query_start_loc_cpu=starts,
            is_valid_token=_empty((tokens,), torch.bool),
            token_to_req_indices=to_request,
            decode_swa_indices=_empty((decoding, 1, 128), torch.int32),
            decode_swa_lens=_empty((decoding,), torch.int32),
            prefill_swa_indices=_empty((prompt, 1, 128), torch.int32) if prompt else None,
            prefill_swa_lens=_empty((prompt,), torch.int32) if prompt else None,
            num_decodes=decodes,
            num_prefills=len(prompts),
            num_decode_tokens=decoding,
            num_prefill_tokens=prompt,
            prefill_seq_lens=seq_lens[decodes:],
            prefill_seq_lens_cpu=lengths,
            prefill_gather_lens=_empty((len(prompts),), torch.int32) if prompt else None,
            prefill_query_lens_cpu=queries,
            prefill_window_size=128,
            prefill_max_model_len=max(4096, longest),
            prefill_max_num_batched_tokens=2048,
            tile_sched_swaonly=StepPlans(),
        )

    def compressed(ratio: int) -> Any:
        prefilled = max((length for _, length in prompts), default=0)
        pays = decoding_pays(prompt, [length for _, length in prompts], ratio)
        listed = decoding if prompt and pays else tokens
        split = [
            (slice(0, decoding), context // ratio),
            (slice(decoding, tokens), prefilled // ratio),
        ]
        buffer = _empty((listed, -(-longest_model // 128 // 128) * 128), torch.int32)
        return types.SimpleNamespace(
            max_seq_len=longest,
            num_actual_tokens=tokens,
            slot_mapping=_empty((tokens,), torch.int64),
            block_table=_empty((requests, -(-longest_model // 256)), torch.int32),
            req_id_per_token=to_request,
            token_to_req_indices=to_request,
            block_size=256,
            c128a_global_decode_topk_indices=buffer[:, : max(1, longest // 128)],
            c128a_decode_topk_lens=_empty((listed,), torch.int32),
            visible=_empty((tokens,), torch.int32),
            selections=[each for each in split if each[0].start < each[0].stop],
        )

    windows = [window() for _ in range(WINDOW_GROUPS)]
    groups: dict[Any, Any] = {}
    found = {}
    for number, layer in enumerate(layers):
        ratio = layer.compress_ratio
        found[layer.swa_cache_layer.prefix] = windows[number % WINDOW_GROUPS]
        owners = []
        if layer.compressor is not None:
            owners += [(layer.prefix, "main"), (layer.compressor.state_cache.prefix, "state")]
        if layer.indexer is not None:
            owners.append((layer.indexer.k_cache.prefix, "index"))
            owners.append((layer.indexer.compressor.state_cache.prefix, "index state"))
        for prefix, kind in owners:
            if (kind, ratio) not in groups:
                groups[kind, ratio] = compressed(ratio)
            found[prefix] = groups[kind, ratio]
    return found, positions


class Step:
    """Steps of the model without a graph."""

    def __init__(self, directory: Path) -> None:
        self.model, self.config = model(directory)
        self.layers = [each.attn for each in self.model.model.layers if hasattr(each, "attn")]
        give_caches(self.layers)

    def run(self, decodes: int, prompt: int) -> Any:
        """A function that runs one, of a whole prompt."""
        return self.serve(decodes, [(prompt, prompt)] if prompt else [])

    def serve(
        self,
        decodes: int,
        prompts: list[tuple[int, int]],
        context: int = CONTEXT,
        drafts: int = 0,
    ) -> Any:
        """A function that runs a step of any requests, with the arguments of ``metadata``."""
        from vllm.forward_context import set_forward_context

        tokens = decodes + drafts + sum(count for count, _ in prompts)
        longest = self.config.model_config.max_model_len
        ids, padding = _empty((tokens,), torch.int32), _empty((tokens,), torch.bool)

        def once() -> float:
            built, positions = metadata(self.layers, decodes, prompts, context, longest, drafts)
            with set_forward_context(built, self.config, num_tokens=tokens, is_padding=padding):
                start = time.perf_counter()
                self.model.model(ids, positions, None, None)
                return time.perf_counter() - start

        return once


@contextlib.contextmanager
def pretended_workspace() -> Iterator[None]:
    """vLLM's workspace lies on the meta device."""
    from anymla.engines.vllm import prefill

    memory = _empty((1 << 30,), torch.uint8)
    manager = types.SimpleNamespace(get_simultaneous=lambda *specs: (memory[: specs[0][0][0]],))
    answers = {
        "current_workspace_manager": lambda: manager,
        "is_workspace_manager_initialized": lambda: True,
    }
    with mock.patch.multiple(prefill, **answers):
        yield


def counted(step: Any, kernels: collections.Counter[str]) -> dict[str, Any]:
    """Launches by kernel, calls of torch, and calls of operations in one step."""
    step()  # what is kept of the first
    kernels.clear()
    called: collections.Counter[str] = collections.Counter()
    run = Operation.__call__

    def noted(operation: Any, *args: Any, **kwargs: Any) -> Any:
        called[operation.name] += 1
        return run(operation, *args, **kwargs)

    calls = TorchCalls()
    with mock.patch.object(Operation, "__call__", noted), calls:
        step()
    return {"launches": dict(kernels), "torch": dict(calls.counts), "operations": dict(called)}


def timed(step: Any, repeats: int) -> dict[str, float]:
    """Microseconds of a step in each operation: every call at its best of many steps."""
    names: list[str] = []
    best: list[float] = []
    run = Operation.__call__

    def noted(operation: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = run(operation, *args, **kwargs)
        spent.append(time.perf_counter() - start)
        names.append(operation.name)
        return result

    for _ in range(repeats):
        spent: list[float] = []
        names.clear()
        with mock.patch.object(Operation, "__call__", noted):
            step()
        best = [min(pair) for pair in zip(best or spent, spent, strict=True)]
    found: dict[str, float] = collections.defaultdict(float)
    for name, seconds in zip(names, best, strict=True):
        found[name] += 1e6 * seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def main() -> None:
    """Write the answer; with ``--times`` print what takes how long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer")
    parser.add_argument("--times", type=int, default=0, help="steps of each kind")
    parser.add_argument("--profile", action="store_true", help="own time of functions")
    options = parser.parse_args()
    answer: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        pretended_device(TARGETS["sm_90"]),
        pretended_workspace(),
        empty_kernels() as kernels,
    ):
        steps = Step(Path(place))
        for name, (decodes, prompt) in STEPS.items():
            once = steps.run(decodes, prompt)
            found = answer[name] = counted(once, kernels)
            sums = {key: sum(found[key].values()) for key in found}
            print(f"{name}:", ", ".join(f"{count} {key}" for key, count in sums.items()))
            if options.times:
                whole = min(once() for _ in range(options.times))
                parts = timed(once, options.times)
                print(f"{name}: {1e3 * whole:.2f} ms, {sum(parts.values()):.0f} us in operations")
                for operation, spent in parts.items():
                    calls = answer[name]["operations"][operation]
                    print(f"    {operation:32s} {spent:7.0f} us  {calls:4d} x {spent / calls:6.1f}")
            if options.profile:
                with cProfile.Profile() as profile:
                    for _ in range(5):
                        once()
                for key in ("tottime", "cumtime"):
                    pstats.Stats(profile).sort_stats(key).print_stats(60)
    Path(options.answer).write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    pretended.pretend()
    main()
