"""The compressor: pools windows of tokens into cache entries, weighted channel by channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymla.layers.rope_table import RopeTable
from anymla.layers.step import GroupStep, Step
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.ops.linear import linear_float32

# Converted to float32 at every use up to here: 2 MiB of it stay in a core's cache.
_CONVERTED_ELEMENTS = 1 << 19


class Compressor(nn.Module):
    """Main compressor of a layer, or the index compressor inside an indexer.

    Attributes:
        kv_gate: [2 * width, hidden], rows of wkv then of wgate, see ``merge_kv_gate``. Its product
            is float32: the pooling weights are exponentials of it.
        ape: float32 [ratio, width], added to the gate by position within the window.
        norm: float32 [D], RMSNorm weight of the pooled row.
    """

    def __init__(
        self,
        *,
        kv_gate: Tensor,
        ape: Tensor,
        norm: Tensor,
        eps: float,
        rope: RopeTable,
        overlap: bool,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.kv_gate = kv_gate
        self.ape = ape
        self.norm = norm
        self.eps = eps
        self.rope = rope
        self.overlap = overlap
        self.backend = backend

    def forward(
        self,
        x: Tensor,
        step: Step,
        state: Tensor,
        state_group: GroupStep,
        cache: Tensor,
        cache_group: GroupStep,
        layout: str,
        *,
        hadamard: bool = False,
    ) -> None:
        """Store each token's partial state, then the entries of the windows that it closes.

        Args:
            x: [T, hidden], the layer's normalised input.
            step: the batch.
            state: float32 [P, bs, 2 * width], written.
            state_group: where the states go.
            cache: pages of ``layout``, written.
            cache_group: where the entries go.
            layout: layout id of ``cache``.
            hadamard: rotate the entry before it is quantised (MXFP4 index keys).
        """
        ratio, width = self.ape.shape
        kv, score = linear_float32(x, self.kv_gate, backend=self.backend).split(width, dim=-1)
        save_partial_states(
            kv,
            score,
            self.ape,
            step.positions,
            state,
            state_group.slot_mapping,
            compress_ratio=ratio,
            backend=self.backend,
        )
        compress_norm_rope_insert(
            state,
            state_group.block_table,
            state_group.slot_mapping,
            step.token_to_req,
            step.positions,
            self.norm,
            self.eps,
            self.rope.upto(step.max_seq_len),
            cache,
            cache_group.slot_mapping,
            compress_ratio=ratio,
            overlap=self.overlap,
            layout=layout,
            hadamard=hadamard,
            backend=self.backend,
        )


def merge_kv_gate(wkv: Tensor, wgate: Tensor, dtype: torch.dtype) -> Tensor:
    """Stack wkv [width, hidden] and wgate [width, hidden] into ``kv_gate``.

    It stays as stored where the product takes it so: on devices with activations of the same
    dtype, and on a CPU if it is small: there a step waits for memory, and reading half as much and
    converting it takes half the time (2048 x 256, one core). Elsewhere it is float32.

    Args:
        wkv: as stored.
        wgate: as stored.
        dtype: of the activations.
    """
    merged = torch.cat((wkv, wgate))
    if merged.device.type == "cpu":
        return merged if merged.numel() <= _CONVERTED_ELEMENTS else merged.float()
    return merged if merged.dtype == dtype else merged.float()
