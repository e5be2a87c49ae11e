"""SGLang's attention backend of DeepSeek-V4 as its constructor makes it, without a model.

A stand-in for the model runner holds what the constructor asks for. Pools, batches, metadata and
methods are SGLang's; pages hold random rows. Plans of the compressor, which neither attention nor
the indexer reads, are left out: they would need kernels that SGLang compiles at run time.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

WINDOW, PAGE = 128, 256
RATIOS = (0, 4, 128)
INDEX_HEADS = 64
_MAIN_BYTES, _INDEX_BYTES = 584, 132
# Mean of the sinks. Softmax over 640 random rows sums to some 1,000 in these units, of which a sink
# is a few per cent then. Around 0 it would be 0.1 %, which attention's rounding hides.
_SINK = 4.0
_BANK = 16  # distinct pages of random rows, which the pages of a pool repeat in random order


@dataclasses.dataclass(frozen=True)
class Load:
    """A batch, by the lengths of its requests and the number of their new tokens.

    Attributes:
        lengths: tokens of each request, the new ones included.
        extends: new tokens of each request; () for a decode step, with one each.
    """

    lengths: tuple[int, ...]
    extends: tuple[int, ...] = ()

    @property
    def new(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return self.extends or (1,) * len(self.lengths)


class Scene:
    """SGLang's backend with filled pools, and a batch.

    Attributes:
        backend: ``DeepseekV4AttnBackend``.
        batch: ``ForwardBatch``.
        load: lengths of the batch's requests.
        heads: heads of a rank.
        layers: numbers of the layers of each ratio.
        q: queries [T, heads, 512].
        sink: logits of the heads.
        index_q: index queries, float8_e4m3fn [T, 64, 128].
        index_weights: float32 [T, 64, 1].
        held: tensors that captured graphs read, which SGLang's backend forgets at the next capture.
    """

    def __init__(
        self,
        load: Load,
        *,
        heads: int,
        topk: int = 512,
        each: int = 1,
        context: int = 1 << 17,
        device: str = "cuda",
        seed: int = 0,
    ) -> None:
        """Make the backend, and fill its pools.

        Args:
            load: lengths of the batch's requests.
            heads: heads of a rank.
            topk: entries that an indexer selects, 512 or 1,024.
            each: layers of each ratio.
            context: longest context that the server allows, which lists are as wide as.
            device: device of the tensors.
            seed: seed of all random numbers.
        """
        self.load = load
        self.held: list[object] = []
        self._device = torch.device(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        ratios = [ratio for ratio in RATIOS for _ in range(each)]
        self.layers = {r: [i for i, each in enumerate(ratios) if each == r] for r in RATIOS}
        self._lay_out(context)
        runner = self._runner(ratios, topk, context)
        self.backend = _backend(runner)
        runner.attn_backend = self.backend
        self.batch = self._batch()
        tokens = sum(load.new)
        self.set_heads(heads)
        self.index_q = self._normal(tokens, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
        self.index_weights = self._normal(tokens, INDEX_HEADS, 1)

    def set_heads(self, heads: int) -> None:
        """Draw queries and logits of another number of heads."""
        self.heads = heads
        self.q = self._normal(sum(self.load.new), heads, 512).bfloat16()
        self.sink = self._normal(heads) + _SINK
        self._padded: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, heads: int | None = None) -> Tensor:
        """Compute a layer's attention by SGLang's own method.

        Args:
            layer: number of the layer.
            heads: number of heads that the call has, padded ones included; None for no padding.
        """
        q, sink = self._of(heads or self.heads)
        key = q[:, :1]
        ratio = self.ratio_of(layer)
        given = {"save_kv_cache": False, "attn_sink": sink}
        radix = types.SimpleNamespace(layer_id=layer, tp_q_head_num=self.heads, v_head_dim=512)
        result: Tensor = self.backend.forward(q, key, key, radix, self.batch, ratio, **given)
        return result

    def select(self, layer: int) -> None:
        """Select a layer's entries by SGLang's own method."""
        indexer = types.SimpleNamespace(
            layer_id=layer,
            use_fp4_indexer=False,
            index_topk=self.backend.index_topk,
            compute_weights=lambda x, skip_scale: self.index_weights,
            compute_q=lambda *args: (self.index_q, self.index_weights),
        )
        x = self.index_weights.flatten(1)
        self.backend.forward_c4_indexer(x, x, indexer, self.batch, skip_compressor=True)

    def ratio_of(self, layer: int) -> int:
        """Return the compress ratio of a layer."""
        return next(ratio for ratio, layers in self.layers.items() if layer in layers)

    @property
    def core(self) -> Any:
        """Lists of the step: ``DSV4AttnMetadata``."""
        return self.backend.forward_metadata.core_attn_metadata

    def rows(self, layer: int, slots: Tensor, *, window: bool) -> Tensor:
        """Decode rows of a layer's window or entries at slots, to float64 [n, 512]."""
        pool, ratio = self.backend.token_to_kv_pool, self.ratio_of(layer)
        buffer = (
            pool.get_swa_key_buffer_radix(layer) if window else pool.get_extra_key_buffer(layer)
        )
        size = PAGE if window else PAGE // ratio
        view = buffer.view(torch.uint8)[:, : size * _MAIN_BYTES].view(len(buffer), size, -1)
        return _decoded(view, slots, MAIN_FP8)

    def expected(self, layer: int, token: int) -> Tensor:
        """Compute a token's attention to its lists and the sink in float64: [heads, 512]."""
        core, ratio = self.core, self.ratio_of(layer)
        listed = core.swa_page_indices[token].flatten()[: core.swa_topk_lengths[token]]
        found = [self.rows(layer, listed[listed >= 0].long(), window=True)]
        if ratio:
            listed = core.sparse_page_indices(ratio)[token].flatten()
            listed = listed[: core.sparse_topk_lengths(ratio)[token]]
            found.append(self.rows(layer, listed[listed >= 0].long(), window=False))
        keys = torch.cat(found)
        scores = self.q[token].double() @ keys.T * 512**-0.5
        logits = torch.cat((scores, self.sink.double().unsqueeze(1)), 1)
        return logits.softmax(1)[:, :-1] @ keys

    def index_scores(self, layer: int, token: int) -> tuple[Tensor, Tensor]:
        """Compute a token's index scores in float64, and return them with the entries' slots."""
        pages = self.backend.forward_metadata.indexer_metadata
        count = int(pages.compressed_seq_lens.flatten()[token])
        entry = torch.arange(count, device=self._device)
        slots = pages.page_table[token].long()[entry // 64] * 64 + entry % 64
        buffer = self.backend.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id=layer)
        view = buffer.view(torch.uint8)[:, : 64 * _INDEX_BYTES].view(len(buffer), 64, -1)
        keys = _decoded(view, slots, INDEX_FP8)
        weights = self.index_weights[token].double()
        scores = (weights.T @ (self.index_q[token].double() @ keys.T).relu())[0]
        return scores, slots

    def _of(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return queries and sink, padded to a number of heads."""
        if heads not in self._padded:
            q = self.q.new_zeros(len(self.q), heads, 512)
            sink = self.sink.new_zeros(heads)
            q[:, : self.heads], sink[: self.heads] = self.q, self.sink
            self._padded[heads] = q, sink
        return self._padded[heads]

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)

    def _permuted(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self._device)

    def _lay_out(self, context: int) -> None:
        """Give every request pages in random order; windows have pages of their own."""
        lengths, new = self.load.lengths, self.load.new
        counts = [-(-length // PAGE) for length in lengths]
        self._pages = 1 + sum(counts)  # page 0 belongs to nobody
        order = 1 + self._permuted(self._pages - 1)
        recent = [
            min(count, -(-(each + WINDOW) // PAGE) + 1)
            for count, each in zip(counts, new, strict=True)
        ]
        self._window_pages = 1 + sum(recent)
        windows = 1 + self._permuted(self._window_pages - 1)
        self._req_to_token = torch.zeros(
            len(lengths) + 1, context, dtype=torch.int32, device=self._device
        )
        within = torch.arange(PAGE, device=self._device)
        to_window = torch.zeros(self._pages, dtype=torch.int64, device=self._device)
        first = first_window = 0
        for request, (count, own) in enumerate(zip(counts, recent, strict=True)):
            mine = order[first : first + count]
            slots = (mine.unsqueeze(1) * PAGE + within).flatten().int()
            self._req_to_token[request + 1, : len(slots)] = slots
            to_window[mine[count - own :]] = windows[first_window : first_window + own]
            first, first_window = first + count, first_window + own
        self._full_to_swa = (to_window.unsqueeze(1) * PAGE + within).flatten()

    def _runner(self, ratios: list[int], topk: int, context: int) -> Any:
        """Return the stand-in for the model runner."""
        config = types.SimpleNamespace(model_type="deepseek_v4", index_topk=topk)
        return types.SimpleNamespace(
            device=str(self._device),
            page_size=PAGE,
            is_draft_worker=False,
            hisparse_coordinator=None,
            spec_algorithm=types.SimpleNamespace(
                is_dspark=lambda: False, is_dflash_family=lambda: False
            ),
            req_to_token_pool=types.SimpleNamespace(req_to_token=self._req_to_token),
            token_to_kv_pool=self._pool(ratios),
            model_config=types.SimpleNamespace(
                context_len=context,
                head_dim=512,
                v_head_dim=512,
                hf_text_config=config,
                num_hidden_layers=len(ratios),
                num_attention_heads=128,
            ),
        )

    def _pool(self, ratios: list[int]) -> Any:
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

        pool = DeepSeekV4TokenToKVPool(
            max_num_reqs=len(self.load.lengths),
            swa_size=self._window_pages * PAGE,
            c4_size=self._pages * PAGE // 4,
            c128_size=self._pages * PAGE // 128,
            c4_state_pool_size=PAGE,
            c128_state_pool_size=PAGE,
            page_size=PAGE,
            swa_page_size=PAGE,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(ratios),
            device=str(self._device),
            enable_memory_saver=False,
            compression_ratios=ratios,
            start_layer=0,
            end_layer=len(ratios),
        )
        pool.register_mapping(self._full_to_swa)
        banks = {size: self._bank(size) for size in (PAGE, PAGE // 4, PAGE // 128)}
        keys = self._index_bank(self._pages + 8)
        for layer, ratio in enumerate(ratios):
            self._fill(pool.get_swa_key_buffer_radix(layer), banks[PAGE])
            if ratio:
                self._fill(pool.get_extra_key_buffer(layer), banks[PAGE // ratio])
            if ratio == 4:
                self._fill(pool.get_index_k_with_scale_buffer(layer_id=layer), keys)
        return pool

    def _bank(self, size: int) -> Tensor:
        """Return random pages of a main cache, as bytes."""
        count = _BANK * max(1, 64 // size)
        view = torch.zeros(count, size, _MAIN_BYTES, dtype=torch.uint8, device=self._device)
        slots = torch.arange(count * size, device=self._device)
        get_layout(MAIN_FP8).write(view, slots, self._normal(count * size, 512))
        return view.flatten(1)

    def _index_bank(self, pages: int) -> Tensor:
        """Return random pages of index keys, all of them different so that no scores tie."""
        view = torch.zeros(pages, 64, _INDEX_BYTES, dtype=torch.uint8, device=self._device)
        slots = torch.arange(pages * 64, device=self._device)
        get_layout(INDEX_FP8).write(view, slots, self._normal(pages * 64, 128))
        return view.flatten(1)

    def _fill(self, buffer: Tensor, bank: Tensor) -> None:
        """Fill a pool's pages with those of a bank, in random order."""
        view = buffer.view(torch.uint8)
        rounds = -(-len(view) // len(bank))
        chosen = torch.cat([self._permuted(len(bank)) for _ in range(rounds)])[: len(view)]
        view[:, : bank.shape[1]] = bank[chosen]

    def _batch(self) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        load, device = self.load, self._device
        lengths, new = load.lengths, load.new
        positions = torch.cat(
            [torch.arange(n - e, n) for n, e in zip(lengths, new, strict=True)]
        ).to(device)
        owners = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(new)).to(
            device
        )
        extended: dict[str, Any] = {}
        if load.extends:
            each = torch.tensor(new, dtype=torch.int32)
            prefixes = [n - e for n, e in zip(lengths, new, strict=True)]
            extended = {
                "extend_num_tokens": sum(new),
                "extend_seq_lens": each.to(device),
                "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32, device=device),
                "extend_start_loc": (each.cumsum(0) - each).int().to(device),
                "extend_seq_lens_cpu": list(new),
                "extend_prefix_lens_cpu": prefixes,
            }
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND if load.extends else ForwardMode.DECODE,
            batch_size=len(lengths),
            input_ids=torch.zeros(sum(new), dtype=torch.int64, device=device),
            req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            out_cache_loc=self._req_to_token[owners, positions].long(),
            positions=positions,
            **extended,
        )


def configure(**fields: Any) -> None:
    """Publish SGLang's configuration for this process, as for one GPU without speculation.

    Args:
        **fields: fields of SGLang's ``ServerArgs``.
    """
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(page_size=PAGE, **fields).install()
    owner: Any = deepseek_v4_backend
    owner.create_paged_compressor_data = lambda *args, **given: None


def _backend(runner: Any) -> Any:
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    backend = DeepseekV4AttnBackend(runner)
    if not hasattr(backend, "_flash_mla_with_kvcache"):  # SGLang binds it on CUDA alone
        from sglang.kernels.ops.attention import flash_mla_interface

        backend._flash_mla_with_kvcache = functools.partial(
            flash_mla_interface.flash_mla_with_kvcache, use_legacy=True
        )
    return backend


def capture(scene: Scene, layers: Callable[[], object], stream: torch.cuda.Stream) -> Any:
    """Capture a decode step in the order of SGLang's ``DecodeCudaGraphRunner``.

    Its lists are made within the graph, from the batch's tensors.

    Args:
        scene: backend and batch.
        layers: function that runs after the lists are made.
        stream: stream that the graph is captured on.

    Returns:
        A ``torch.cuda.CUDAGraph`` that was replayed once.
    """
    backend, batch = scene.backend, scene.batch

    def run_once() -> None:
        backend.init_forward_metadata_in_graph(batch)
        layers()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.init_cuda_graph_state(batch.batch_size, batch.batch_size)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for _ in range(2):
            run_once()
            backend.on_after_cuda_graph_warmup()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run_once()
        metadata = backend.forward_metadata
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = metadata  # the graph's, whose tensors the replay writes
        scene.held.append((metadata, backend.cuda_graph_metadata_of_bucket_and_bs))
        graph.replay()
        stream.synchronize()
    return graph


def _decoded(view: Tensor, slots: Tensor, layout: str) -> Tensor:
    """Decode entries of pages [P, entries, bytes] at slots, by the oracle on the CPU."""
    from anymla.testing.oracle.row_formats import ROW_FORMATS

    size = view.shape[1]
    planes = get_layout(layout).planes(view)
    picked = [each[slots // size, slots % size].cpu() for each in planes if each is not None]
    return ROW_FORMATS[layout].decode(*picked).to(view.device)


def spread(count: int, parts: int) -> Sequence[int]:
    """Return a few token numbers, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(1, parts - 1)) for i in range(parts)})


def select_as(*, scores: bool, topk: bool) -> None:
    """Choose how SGLang selects in backends made from now on.

    Args:
        scores: True for DeepGEMM's scores; False for SGLang's formula in torch.
        topk: True for SGLang's own kernel, which it compiles at first use; False for torch's.
    """
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_context

    envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(not scores)
    # Its planner belongs to the DeepGEMM that SGLang pins; each DeepGEMM has one of its own.
    envs.SGLANG_OPT_USE_JIT_INDEXER_METADATA.set(False)
    get_context().override("a benchmark", dsa_topk_backend="sgl-kernel" if topk else "torch")
