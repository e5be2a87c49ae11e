"""Steps that are run while vLLM starts, so that no request waits for a kernel to be compiled.

vLLM captures decode steps of a few sizes. Between them it schedules any number of tokens, together
with prefills of any length, and the choice of kernels follows from both. A rehearsed step runs the
model as vLLM does, with metadata that name no request: every list is empty and no slot is written,
so that caches stay unchanged.

A kernel takes 1 to 3 s to compile, and there are some 150. So the same steps first run in a form
that executes nothing and compiles on all cores; ranks divide the kernels among them. In this form
alone prefills run beside decodes: what is read of their parts of a step begins at any address, for
which Triton compiles kernels again. A start that finds the mark of an earlier one, by which all of
these kernels are in Triton's cache, leaves this form out: to look up each of them takes as many
launches as to compile it.

vLLM runs the model once before that, to measure memory, when there are no caches yet. Its kernels
would be compiled one after the other, so steps without attention are compiled before this run.

DeepGEMM compiles one kernel after the other, some ten seconds each. Its warm-up is vLLM's
(``vLLM_DEEP_GEMM_WARMUP``): if that is off, DeepGEMM's products are left out here as well.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from vllm import envs
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.mla import sparse_swa

from anymla.engines.vllm.attention import AnymlaAttention
from anymla.engines.vllm.prefill import Chunk, StepPlans
from anymla.ops.attention.plan import decoding_pays
from anymla.ops.compile_ahead import compiled_together
from anymla.ops.compile_mark import CompileMark

_LOG = init_logger("vllm.plugins.anymla")
# Contexts double from here on; kernels change at most that often.
_SHORTEST = 1024
# Attention is rehearsed with every number of decodes up to here; a model's other kernels change
# rarely.
_EVERY_NUMBER = 512
# Decodes before a step's prefills. After 1, 4 and 16 of them int32 and bool values of the prefills'
# tokens begin at multiples of 16 bytes: neither, one, both.
_BEFORE = (1, 4, 16)
# Functions by which Python code gets memory that nobody has written to.
_ALLOCATING = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
# DeepGEMM's products in layers of many tokens, and the index of the argument for the result.
_RESULT_OF = {"_fp8_gemm_nt_impl": 2, "_fp8_einsum_impl": 3}


def register(model: nn.Module, vllm_config: Any) -> None:
    """Register rehearsed steps with vLLM's own compilation at start-up, if it compiles.

    vLLM's metadata of windows stay, and compile a kernel for each power of two of prefills. Its
    attention would have registered them, had it been built.
    """
    if next(model.parameters()).device.type != "cpu":
        rehearsal = Rehearsal(model, vllm_config)
        JitWarmupRegistry.register(_Warmup(rehearsal))
        sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL.register_warmup()
        parallel = vllm_config.parallel_config
        # Other ranks' first runs are not this one's.
        alone = parallel.world_size_across_dp == parallel.tensor_parallel_size
        if vllm_config.kernel_config.enable_jit_warmup and alone:
            _before_first_run(model, rehearsal)


def _before_first_run(model: nn.Module, rehearsal: Rehearsal) -> None:
    """Compile when the model is first called, if that is without metadata, as without caches."""

    def compile_first(*_: Any) -> None:
        hook.remove()
        if not get_forward_context().attn_metadata:
            _attempt(rehearsal, rehearsal.run_without_caches)

    hook = model.register_forward_pre_hook(compile_first)


class _Warmup(VllmJitKernel[int]):
    """Kernel of vLLM's registry; it runs after the caches exist and before graphs are captured."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def get_warmup_keys(self) -> list[int]:
        return [0]

    def compile(self, compile_key: int) -> None:
        start = time.perf_counter()
        if _attempt(self.rehearsal, self.rehearsal.run):
            _LOG.info("anymla: steps rehearsed in %.0f s", time.perf_counter() - start)


def _attempt(rehearsal: Rehearsal, run: Callable[[], None]) -> bool:
    """Return whether it ran; an exception is raised only where other ranks wait for this one."""
    try:
        run()
    except Exception:  # a server that compiles at first use is better than none
        if rehearsal.config.parallel_config.world_size_across_dp > 1:
            raise
        _LOG.exception("anymla: steps were not rehearsed; kernels are compiled at first use")
        return False
    return True


class Rehearsal:
    """Rehearsed steps of one model.

    Attributes:
        layers: attention layers of the model.
        most_tokens: most tokens of a step.
        most_decodes: most tokens of decoding requests in a step.
        contexts: lengths of requests in tokens, the longest last.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        """Rehearse a model whose attention, indexer and compressors are anymla's."""
        self.model, self.config = model, vllm_config
        self.layers = [each for each in model.modules() if isinstance(each, AnymlaAttention)]
        scheduler = vllm_config.scheduler_config
        self.most_tokens = scheduler.max_num_batched_tokens
        drafts = vllm_config.num_speculative_tokens
        self.most_decodes = min(scheduler.max_num_seqs * (1 + drafts), self.most_tokens)
        self.contexts = _doubled(_SHORTEST, vllm_config.model_config.max_model_len)

    @torch.inference_mode()
    def run(self) -> None:
        """Compile the kernels of every kind of step on all cores, then run every kind."""
        with self._one_layer_of_each_kind():
            if self._device().type != "cpu":
                self._compile(self.purpose(), self.steps, self.mixed_steps)
            left_out = envs.VLLM_DEEP_GEMM_WARMUP == "skip"
            with _without_deep_gemm() if left_out else contextlib.nullcontext():
                self.steps()

    @torch.inference_mode()
    def run_without_caches(self) -> None:
        """Compile the kernels of steps without attention on all cores."""
        with self._one_layer_of_each_kind():
            self._compile(self.purpose(caches=False), self.bare_steps)

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _compile(self, purpose: dict[str, Any], *kinds: Callable[[], None]) -> None:
        """Compile the kernels on all cores, unless all ranks find them compiled.

        Args:
            purpose: values that the kernels follow from.
            kinds: functions that run steps.
        """
        start, device = time.perf_counter(), self._device()
        mark = CompileMark(purpose, device)
        if _all(mark.is_valid(), device):
            _LOG.info("anymla: an earlier start compiled these kernels")
            return
        with compiled_together(**_ranks()) as compiling:
            if compiling:
                with _without_deep_gemm(), _zeros():
                    for steps in kinds:
                        steps()
        mark.leave(compiling.hashes)
        _LOG.info("anymla: kernels compiled in %.0f s", time.perf_counter() - start)

    def purpose(self, *, caches: bool = True) -> dict[str, Any]:
        """Return what the kernels follow from, but for the machine: a start with the same has them.

        Tensors' numbers of rows count by what Triton compiles for.

        Args:
            caches: True for steps that use caches.
        """
        config, parallel = self.config.model_config.hf_config, self.config.parallel_config
        named = {"_name_or_path", "transformers_version"}
        kinds = (type(each) for each in self.model.modules())
        methods = (type(getattr(each, "quant_method", None)) for each in self.model.modules())
        tensors = itertools.chain(
            self.model.named_parameters(),
            self.model.named_buffers(),
            self._caches() if caches else (),
        )
        return {
            "name": "vLLM's steps" if caches else "vLLM's steps without attention",
            "model": {k: v for k, v in config.to_dict().items() if k not in named},
            "classes": _digest([f"{each.__module__}.{each.__qualname__}" for each in kinds]),
            "methods": _digest([f"{each.__module__}.{each.__qualname__}" for each in methods]),
            "tensors": _digest([(name, _described(each)) for name, each in tensors]),
            "dtype": str(self.config.model_config.dtype),
            "tokens": [self.most_tokens, self.most_decodes],
            "contexts": self.contexts,
            "parallel": [
                parallel.world_size_across_dp,
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.enable_expert_parallel,
            ],
        }

    def _caches(self) -> Iterator[tuple[str, Any]]:
        for layer in self.layers:
            owners = [layer, layer.swa_cache_layer, getattr(layer.compressor, "state_cache", None)]
            if layer.indexer is not None:
                owners += [layer.indexer.k_cache, layer.indexer.compressor.state_cache]
            for number, owner in enumerate(owners):
                yield f"{layer.prefix} {number}", getattr(owner, "kv_cache", None)

    @contextlib.contextmanager
    def _one_layer_of_each_kind(self) -> Iterator[None]:
        inner = self.model.model
        first: dict[tuple[int, bool, bool], nn.Module] = {}
        for number in range(inner.start_layer, inner.end_layer):
            layer = inner.layers[number]
            # The first layer's streams are equal; some layers choose experts by token id.
            by_id, begins = layer.ffn.gate.tid2eid is not None, number == inner.start_layer
            first.setdefault((layer.attn.compress_ratio, by_id, begins), layer)
        kept = inner.layers, inner.start_layer, inner.end_layer
        inner.layers = nn.ModuleList(first.values())
        inner.start_layer, inner.end_layer = 0, len(first)
        try:
            yield
        finally:
            inner.layers, inner.start_layer, inner.end_layer = kept

    def steps(self) -> None:
        """Run every kind of step."""
        longest, whole = self.contexts[-1], self.config.parallel_config.pipeline_parallel_size == 1
        for tokens in _sizes(self.most_tokens) if whole else ():
            for context in (self.contexts[0], longest):
                self._forward(tokens, _Prefill(self.layers, tokens, context))
            if tokens <= self.most_decodes or self._attend_by_slots(tokens, longest):
                self._forward(tokens, _Decodes(self.layers, tokens, longest))
        kinds = {layer.compress_ratio: layer for layer in self.layers}
        decodes = range(1, min(self.most_decodes, _EVERY_NUMBER) + 1)
        for tokens, context in itertools.product(decodes, self.contexts):
            step = _Decodes([*kinds.values()], tokens, context)
            for ratio, layer in kinds.items():
                if ratio > 4 or context == longest:
                    self._attend(layer, tokens, step)
        sizes = [n for n in _sizes(self.most_tokens) if n >= _EVERY_NUMBER or n & (n - 1) == 0]
        for tokens, context in itertools.product(sizes, self.contexts):
            for layer in kinds.values():
                if layer.indexer is not None:
                    self._select(layer, tokens, [_Decodes([layer], tokens, context)])

    def bare_steps(self) -> None:
        """Run steps without attention: the largest first, which vLLM's first run is."""
        for tokens in reversed(_sizes(self.most_tokens)):
            positions = torch.zeros(tokens, dtype=torch.int64, device=self._device())
            self._forward(tokens, SimpleNamespace(metadata=None, positions=positions))

    def mixed_steps(self) -> None:
        """Run attention and selection of prefills behind decodes."""
        kinds = {layer.compress_ratio: layer for layer in self.layers}
        short, longest = self.contexts[0], self.contexts[-1]
        for layer, tokens in itertools.product(kinds.values(), _sizes(self.most_tokens)):
            for decodes in _BEFORE:
                if decodes + tokens > self.most_tokens:
                    continue
                if self._attend_by_slots(tokens, longest):
                    step = _Mixed(layer, decodes, tokens, (longest, longest))
                    self._attend(layer, decodes + tokens, step)
                if layer.indexer is not None:
                    pairs = [(short, each) for each in self.contexts]
                    pairs += [(each, short) for each in self.contexts]
                    steps = (_Mixed(layer, decodes, tokens, contexts) for contexts in pairs)
                    self._select(layer, decodes + tokens, steps)
            if layer.indexer is not None and tokens <= min(self.most_decodes, self.most_tokens - 1):
                self._select(layer, tokens + 1, [_Mixed(layer, tokens, 1, (short, longest))])

    def _attend_by_slots(self, tokens: int, context: int) -> bool:
        """True if some layers' prefills of so few tokens attend by slots, as decodes do."""
        ratios = {layer.compress_ratio for layer in self.layers}
        return not all(decoding_pays(tokens, [context], ratio) for ratio in ratios)

    def _forward(self, tokens: int, step: _Step | SimpleNamespace) -> None:
        """Run a whole step, bypassing any replacement of this model's forward, such as an audit."""
        inner, ids = self.model.model, step.positions.int()
        with self._context(tokens, step):
            type(inner).forward(inner, ids, step.positions, None, None)

    def _context(self, tokens: int, step: _Step | SimpleNamespace) -> Any:
        # Routers read it in every step of vLLM's second runner.
        padding = torch.zeros(tokens, dtype=torch.bool, device=step.positions.device)
        return set_forward_context(
            step.metadata, self.config, num_tokens=tokens, is_padding=padding
        )

    def _attend(self, layer: Any, tokens: int, step: _Step) -> None:
        q = layer.attn_sink.new_empty(
            (tokens, len(layer.attn_sink), layer.head_dim), dtype=self.config.model_config.dtype
        )
        with self._context(tokens, step):
            layer.forward_mqa(q, q[:, 0], step.positions, torch.empty_like(q))

    def _select(self, layer: Any, tokens: int, steps: Iterable[_Step]) -> None:
        """Select for one query in steps of so many tokens."""
        indexer, dtype = layer.indexer, self.config.model_config.dtype
        hidden = layer.attn_sink.new_zeros((tokens, layer.q_lora_rank), dtype=dtype)
        weights = hidden.new_zeros((tokens, indexer.n_head))
        query: Any = None
        for step in steps:
            with self._context(tokens, step):
                if query is None:
                    q, scales, weights = indexer(
                        hidden, hidden, None, weights, step.positions, layer.indexer_rotary_emb,
                        skip_compressor=True,
                    )  # fmt: skip
                    query = q if scales is None else (q, scales)
                if query is None:  # every entry is selected
                    weights = hidden.new_zeros((tokens, indexer.n_head))
                else:
                    indexer.indexer_op(hidden, query, None, weights)


def _ranks() -> dict[str, int]:
    """Return the ranks that compile the same kernels; each process has layers of every kind."""
    if not distributed.is_initialized():
        return {}
    return {"rank": distributed.get_rank(), "ranks": distributed.get_world_size()}


def _all(holds: bool, device: torch.device) -> bool:
    """True if it holds on all ranks, whose layers exchange results in every form of a step."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return holds
    flag = torch.tensor(int(holds), device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag)


def _described(tensor: Any) -> Any:
    """Return what a launch may depend on of a tensor, but for its values and number of rows."""
    if not isinstance(tensor, Tensor):
        return str(type(tensor))
    rows = tensor.shape[0] if tensor.ndim else 1
    size, address = tensor.numel() * tensor.itemsize, 0
    if tensor.device.type != "meta":
        address = tensor.data_ptr() % 16
    layout = [str(tensor.dtype), *tensor.shape[1:], tensor.stride()]
    return [*layout, rows % 16 == 0, min(rows, 2), size.bit_length(), address]


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


@contextlib.contextmanager
def _without_deep_gemm() -> Iterator[None]:
    """Replace DeepGEMM's products by zeros, so that nothing is compiled for them."""
    kept = {name: getattr(deep_gemm, name) for name in _RESULT_OF}
    for name, product in kept.items():
        if product is not None:
            setattr(deep_gemm, name, functools.partial(_zero_result, _RESULT_OF[name]))
    try:
        yield
    finally:
        for name, product in kept.items():
            setattr(deep_gemm, name, product)


def _zero_result(place: int, *args: Any, **_: Any) -> None:
    args[place].zero_()


@contextlib.contextmanager
def _zeros() -> Iterator[None]:
    """Let Python code allocate zeros: kernels that do not run write no slots, ids or numbers.

    A mode of torch's dispatcher would do the same, and take half of the time of a step.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in _ALLOCATING:
            allocate = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _zeroed(allocate)))
        yield


def _zeroed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def zeros(*args: Any, **kwargs: Any) -> Tensor:
        return allocate(*args, **kwargs).zero_()

    return zeros


class _Step:
    """Metadata of a step without requests; attributes are those that layers read.

    Attributes:
        metadata: metadata by the name of a cache.
        positions: int64 [T], position 0 for every token.
    """

    def __init__(self, layers: list[Any], tokens: int, context: int) -> None:
        """Build the metadata for the caches of these layers."""
        device = layers[0].attn_sink.device
        self.metadata: dict[str, SimpleNamespace] = {}
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        none = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
        common = {
            "slot_mapping": none,
            # all tokens belong to request 0
            "block_table": zeros.new_zeros((1, -(-context // 64))),
            "req_id_per_token": zeros,
            "token_to_req_indices": zeros,
            "max_seq_len": context,
        }
        # Layers of one ratio have equal metadata and share it: a list is as long as the context.
        kinds = {layer.compress_ratio: layer for layer in layers}
        windows = {
            ratio: self._window(layer, tokens, context, zeros, common)
            for ratio, layer in kinds.items()
        }
        entries = {
            ratio: self._entries(layer, tokens, context, zeros, common)
            for ratio, layer in kinds.items()
        }
        for layer in layers:
            self._add(layer, windows[layer.compress_ratio], entries[layer.compress_ratio])

    def _window(
        self, layer: Any, tokens: int, context: int, zeros: Tensor, common: dict[str, Any]
    ) -> SimpleNamespace:
        listed = zeros.new_zeros((tokens, 1, layer.window_size))
        parts = {
            "is_valid_token": zeros.bool(),
            "decode_swa_indices": listed,
            "decode_swa_lens": zeros,
            "prefill_swa_indices": listed[:0],
            "prefill_swa_lens": zeros[:0],
        }
        return SimpleNamespace(**common | parts | self._split(layer, tokens, context, zeros))

    def _entries(
        self, layer: Any, tokens: int, context: int, zeros: Tensor, common: dict[str, Any]
    ) -> SimpleNamespace:
        ratio = max(1, layer.compress_ratio)
        listed = 0 if layer.compressor is None or layer.indexer else max(1, context // ratio)
        return SimpleNamespace(
            **common,
            block_size=64 * ratio,
            visible=zeros,
            selections=[(slice(0, tokens), context // ratio)],
            c128a_global_decode_topk_indices=zeros.new_zeros((tokens, listed)),
            c128a_decode_topk_lens=zeros,
        )

    def _add(self, layer: Any, window: SimpleNamespace, compressed: SimpleNamespace) -> None:
        self.metadata[layer.swa_cache_layer.prefix] = window
        if layer.compressor is None:
            return
        self.metadata[layer.prefix] = compressed
        self.metadata[layer.compressor.state_cache.prefix] = compressed
        if layer.indexer is not None:
            self.metadata[layer.indexer.k_cache.prefix] = compressed
            self.metadata[layer.indexer.compressor.state_cache.prefix] = compressed

    def _split(self, layer: Any, tokens: int, context: int, zeros: Tensor) -> dict[str, Any]:
        raise NotImplementedError


class _Decodes(_Step):
    """A step in which each token belongs to a request of its own."""

    def _split(self, layer: Any, tokens: int, context: int, zeros: Tensor) -> dict[str, Any]:
        plans = StepPlans()
        return {"num_decode_tokens": tokens, "num_prefill_tokens": 0, "tile_sched_swaonly": plans}


class _Mixed(_Step):
    """A step of requests that decode, and prefills that attend by slots."""

    def __init__(self, layer: Any, decodes: int, tokens: int, contexts: tuple[int, int]) -> None:
        """Build the metadata of one layer's caches.

        Args:
            layer: attention layer whose caches the step uses.
            decodes: number of decodes.
            tokens: number of the prefills' tokens.
            contexts: longest context of the decodes, and of the prefills.
        """
        self._decodes = decodes
        super().__init__([layer], decodes + tokens, max(contexts))
        spans = slice(0, decodes), slice(decodes, decodes + tokens)
        for metadata in self.metadata.values():
            metadata.selections = [
                (span, context // layer.compress_ratio)
                for span, context in zip(spans, contexts, strict=True)
            ]

    def _split(self, layer: Any, tokens: int, context: int, zeros: Tensor) -> dict[str, Any]:
        rows, count = self._decodes, tokens - self._decodes
        listed = zeros.new_zeros((tokens, 1, layer.window_size))
        return {
            "num_decode_tokens": rows,
            "num_prefill_tokens": count,
            "decode_swa_indices": listed[:rows],
            "decode_swa_lens": zeros[:rows],
            "prefill_swa_indices": listed[:count],
            "prefill_swa_lens": zeros[:count],
            "tile_sched_swaonly": _NoChunks(),
        }


class _Prefill(_Step):
    """A step of one request, which attends to a workspace, or by slots if that is faster."""

    def __init__(self, layers: list[Any], tokens: int, context: int) -> None:
        """Build the metadata of the layers' caches, for ``context`` tokens of the request."""
        self._plans = _OneChunk()
        super().__init__(layers, tokens, context)

    def _split(self, layer: Any, tokens: int, context: int, zeros: Tensor) -> dict[str, Any]:
        ratio, width = layer.compress_ratio, layer.window_size
        # One entry more than the indexer keeps is enough to make it select.
        most = 0 if layer.indexer is None else layer.topk_indices_buffer.shape[1]
        entries = min(context // ratio, most + 1) if ratio > 1 else 0
        lengths = zeros.new_zeros(1)
        self._plans.by_ratio[ratio] = Chunk(
            requests=slice(0, 1),
            tokens=slice(0, tokens),
            entries=entries,
            rows=entries + width + tokens,
            seq_lens=lengths,
            entry_lens=lengths // max(1, ratio),
            gather_lens=lengths,
            window=width,
            ranges=zeros.new_zeros((tokens, 4)),
        )
        return {
            "num_decode_tokens": 0,
            "num_prefill_tokens": tokens,
            "tile_sched_swaonly": self._plans,
        }


class _NoChunks(StepPlans):
    """Plans of a step whose prefills attend by slots."""

    def of_pass(self) -> StepPlans:
        return _NoChunks()

    def chunks(
        self, window: Any, positions: Tensor, ratio: int, requests_a_chunk: int
    ) -> list[Chunk]:
        return []


class _OneChunk(StepPlans):
    """Plans of a step whose only prefill is one chunk.

    Attributes:
        by_ratio: chunk by the compression ratio of a layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_ratio: dict[int, Chunk] = {}

    def of_pass(self) -> StepPlans:
        return self

    def chunks(
        self, window: Any, positions: Tensor, ratio: int, requests_a_chunk: int
    ) -> list[Chunk]:
        return [self.by_ratio[ratio]]


def _doubled(first: int, last: int) -> list[int]:
    found = [min(first, last)]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


def _sizes(most: int) -> list[int]:
    """Return token counts at which kernels may change: powers of two, one more, halfway."""
    return sorted({min(n, most) for n in _candidates(most)})


def _candidates(most: int) -> Iterator[int]:
    power = 1
    while power < 2 * most:
        yield from (power, power + 1, power * 3 // 2)
        power *= 2
