"""Bytes and operations that a decode layer cannot do without."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from anymla.bench.layer_setup import DecodeBatch
from anymla.formats.page_layout import get_layout
from anymla.layers.compressor import Compressor
from anymla.layers.decoder import DecoderLayer
from anymla.layers.linear import Linear, LinearPair, PackedWeight
from anymla.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of a layer, counted and not measured.

    Attributes:
        weight_bytes: bytes of weights that a batch uses, of experts only the visited ones.
        expert_bytes: bytes of the visited routed experts, which ``weight_bytes`` includes.
        cache_bytes: bytes of cache rows that are attended to or scored.
        flops: multiplications and additions of all products.
    """

    weight_bytes: int
    expert_bytes: int
    cache_bytes: int
    flops: int

    def roofline_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the least time in us at the machine's measured rates, by bytes or operations."""
        moved = self.weight_bytes + self.cache_bytes
        return max(moved / bytes_per_s, self.flops / flops_per_s) * 1e6


def layer_work(layer: DecoderLayer, config: ModelConfig, batch: DecodeBatch, visited: int) -> Work:
    """Count a layer's work for a batch of one token a request, which visits so many experts."""
    step = batch.step
    tokens = len(step.token_ids)
    weights = sum(_nbytes(tensor) for tensor in _tensors(layer))
    per_expert = sum(
        _nbytes(values[0])
        for part in (layer.ffn.w1, layer.ffn.w2, layer.ffn.w3)
        for values in (part.weights, part.scales)
        if values
    )
    products = sum(tensor.numel() for tensor in _matrices(layer))
    expert_product = 3 * config.hidden_size * config.moe_intermediate_size
    window, entries, scored = _rows(layer, batch)
    formats = batch.cache.format
    read = zip(
        (formats.main, formats.entries, formats.index), (window, entries, scored), strict=True
    )
    return Work(
        weight_bytes=weights + visited * per_expert,
        expert_bytes=visited * per_expert,
        cache_bytes=tokens * sum(_row_bytes(layout) * rows for layout, rows in read),
        flops=2 * tokens * (products + config.num_experts_per_tok * expert_product)
        + 4 * tokens * config.num_attention_heads * config.head_dim * (window + entries)
        + 2 * tokens * config.index_n_heads * config.index_head_dim * scored,
    )


def _rows(layer: DecoderLayer, batch: DecodeBatch) -> tuple[int, int, int]:
    """Count window rows and entries that a token attends to, and keys scored for it."""
    spec, context = layer.attention.spec, batch.step.max_seq_len
    window = min(context, spec.window)
    if not spec.ratio:
        return window, 0, 0
    entries = context // spec.ratio
    if spec.selects and entries > spec.selection_width:
        return window, spec.selection_width, entries
    return window, entries, 0


def _row_bytes(layout_id: str) -> int:
    layout = get_layout(layout_id)
    return layout.data_bytes + layout.scale_bytes


def _packed(layer: nn.Module) -> list[PackedWeight]:
    modules = list(layer.modules())
    # The parts of merged products are among the modules as well.
    merged = {id(module.merged) for module in modules if isinstance(module, LinearPair)}
    found = [
        module.packed
        for module in modules
        if isinstance(module, Linear) and id(module) not in merged
    ]
    assert isinstance(layer, DecoderLayer)
    return [*found, layer.attention.output.wo_a]


def _matrices(layer: DecoderLayer) -> list[Tensor]:
    gates = [module.kv_gate for module in layer.modules() if isinstance(module, Compressor)]
    sites = [layer.attention_site.fn, layer.ffn_site.fn, layer.ffn.router.gate]
    return [*(packed.weight for packed in _packed(layer)), *gates, *sites]


def _tensors(layer: DecoderLayer) -> list[Tensor]:
    scales = [packed.scale for packed in _packed(layer) if packed.scale is not None]
    return [*_matrices(layer), *scales]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
