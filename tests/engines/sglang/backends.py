"""SGLang's attention backend of DeepSeek-V4 on a CPU, made without its constructor."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

WINDOW, PAGE, TOPK = 128, 256, 64
RATIOS = (0, 4, 128)


@dataclasses.dataclass
class Scene:
    """A backend with filled pools, one layer of each ratio, and a batch of decoding requests.

    Attributes:
        backend: SGLang's backend.
        q: queries [T, H, 512].
        sink: logits of the heads.
        lengths: tokens of each request, the new one included.
        layers: the radix-attention layer of each ratio.
        batch: SGLang's batch.
        patch: what a test puts here to spoil something.
    """

    backend: Any
    q: Tensor
    sink: Tensor
    lengths: list[int]
    layers: dict[int, Any]
    batch: Any
    patch: Any = None

    def attend(self, ratio: int) -> Tensor:
        """Compute a layer's attention by SGLang's own method."""
        layer, rows = self.layers[ratio], self.q[:, :1]
        given = {"save_kv_cache": False, "attn_sink": self.sink}
        result: Tensor = self.backend._forward_attention(
            self.q, rows, rows, layer, self.batch, ratio, **given
        )
        return result


def scene(lengths: list[int], heads: int = 8, seed: int = 0) -> Scene:
    """Fill pools of a window, of ratio 4 and of ratio 128, and list a decode step's rows."""
    from sglang.kernels.ops.attention import flash_mla_interface
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.layers.attention.deepseek_v4_backend import (
        DeepseekV4AttnBackend,
        DSV4AttnMetadata,
    )
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    generator = torch.Generator().manual_seed(seed)
    tokens, longest = len(lengths), max(lengths)
    pages = -(-longest // PAGE)
    count = pages * tokens + 1  # page 0 belongs to nobody
    table = 1 + torch.randperm(count - 1, generator=generator).view(tokens, pages)
    bytes_of = {size: KVLayout.V4.page_bytes(size) for size in (PAGE, PAGE // 4, PAGE // 128)}
    buffers = {
        ratio: _filled(count, size, bytes_of[size], generator)
        for ratio, size in ((0, PAGE), (4, PAGE // 4), (128, PAGE // 128))
    }
    index_keys = torch.zeros(count, 64 * 132, dtype=torch.uint8)
    view = index_keys.view(count, 64, 132)
    rows = torch.randn(count * 64, 128, generator=generator)
    get_layout(INDEX_FP8).write(view, torch.arange(count * 64), rows)

    core: Any = object.__new__(DSV4AttnMetadata)
    position = torch.tensor(lengths) - 1
    places = position.unsqueeze(1) - torch.arange(WINDOW)
    slots = _slots(table, places.clamp(min=0), PAGE)
    core.swa_page_indices = torch.where(places >= 0, slots, -1).int()
    core.swa_topk_lengths = torch.tensor(lengths).clamp(max=WINDOW).int()
    core.positions_casual = position.int()
    core.c4_sparse_page_indices = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    core.c4_sparse_raw_indices = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    core.c4_sparse_topk_lengths = (torch.tensor(lengths) // 4).clamp(1, TOPK).int()
    complete = torch.tensor(lengths) // 128
    entry = torch.arange(64).expand(tokens, -1)
    listed = _slots(table, entry.clamp(max=pages * 2 - 1), PAGE // 128)
    core.c128_page_indices = torch.where(entry < complete.unsqueeze(1), listed, -1).int()
    core.c128_topk_lengths_clamp1 = complete.clamp(min=1).int()
    for ratio in RATIOS:
        setattr(core, f"c{ratio}_flashmla_metadata", flash_mla_interface.get_mla_metadata()[0])

    pool: Any = object.__new__(DeepSeekV4TokenToKVPool)
    layers = {ratio: _layer(number, heads) for number, ratio in enumerate(RATIOS)}
    ratio_of = dict(enumerate(RATIOS))
    pool.kv_layout, pool.request_window = KVLayout.V4, None
    pool.get_swa_key_buffer_radix = lambda layer_id: buffers[0]
    pool.get_extra_key_buffer = lambda layer_id: buffers[ratio_of[layer_id]]
    pool.get_swa_key_page_size = lambda: PAGE
    pool.get_extra_key_page_size = lambda layer_id: PAGE // ratio_of[layer_id]
    pool.get_swa_key_bytes_per_token = pool.get_extra_key_bytes_per_token = lambda *a: 584
    pool.get_index_k_with_scale_buffer = lambda layer_id: index_keys
    pool.translate_loc_from_full_to_swa = lambda slots: slots

    backend: Any = object.__new__(DeepseekV4AttnBackend)
    backend.token_to_kv_pool, backend.softmax_scale, backend.head_dim_v = pool, 512**-0.5, 512
    backend.mtp_enabled = backend.is_dsv41 = backend.is_dspark_draft = False
    backend.hisparse_coordinator = None
    backend._flash_mla_with_kvcache = functools.partial(
        flash_mla_interface.flash_mla_with_kvcache, use_legacy=True
    )
    backend._use_sparse_prefill = lambda *args, **kwargs: False
    backend.device = "cpu"
    backend.req_to_token = _slots(table, torch.arange(pages * PAGE).expand(tokens, -1), PAGE).int()
    indexer_metadata = types.SimpleNamespace(
        page_table=table.int(),
        compressed_seq_lens=(torch.tensor(lengths) // 4).int(),
        compressed_page_size=64,
    )
    backend.forward_metadata = types.SimpleNamespace(
        core_attn_metadata=core, core_metadata=core, indexer_metadata=indexer_metadata
    )
    config = types.SimpleNamespace(num_hidden_layers=len(RATIOS), num_attention_heads=heads)
    backend.model_runner = types.SimpleNamespace(model_config=config, is_draft_worker=False)
    backend.model_runner.attn_backend = backend
    batch = types.SimpleNamespace(
        forward_mode=types.SimpleNamespace(is_idle=lambda: False),
        positions=position,
        req_pool_indices=torch.arange(tokens),
        batch_size=tokens,
        extend_seq_lens_cpu=None,
        rids=[f"request-{number}" for number in range(tokens)],
    )
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16()
    sink = torch.randn(heads, generator=generator)
    return Scene(backend, q, sink, lengths, layers, batch)


def _layer(number: int, heads: int) -> Any:
    return types.SimpleNamespace(layer_id=number, tp_q_head_num=heads, v_head_dim=512)


def _slots(table: Tensor, places: Tensor, page: int) -> Tensor:
    return table.gather(1, places // page) * page + places % page


def _filled(count: int, size: int, width: int, generator: torch.Generator) -> Tensor:
    buffer = torch.zeros(count, width, dtype=torch.uint8)
    view = buffer[:, : size * 584].view(count, size, 584)
    rows = torch.randn(count * size, 512, generator=generator)
    get_layout(MAIN_FP8).write(view, torch.arange(count * size), rows)
    return buffer
