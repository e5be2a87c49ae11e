"""The compressor: pools windows of tokens into cache entries, weighted channel by channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.rope_table import RopeTable
from anymla.layers.rows import GroupStep
from anymla.layers.step import Step
from anymla.ops.compressor import (
    compress_norm,
    compress_norm_rope_insert,
    save_partial_states,
)
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.linear import linear_float32
from anymla.ops.linear.config import plain_backend
from anymla.ops.norm_rope import rms_norm, rope

# Weights up to this size are converted to float32 at every use: 2 MiB of it stay in a core's cache.
_CONVERTED_ELEMENTS = 1 << 19


class Compressor(nn.Module):
    """Main compressor of a layer, or the index compressor inside an indexer.

    Attributes:
        kv_gate: [2 * width, hidden], rows of wkv, then of wgate, see ``merge_kv_gate``. The product
            is float32, because the pooling weights are exponentials of it. [width, hidden] if an
            entry has one token and needs no pooling weight.
        ape: float32 [ratio, width], bias of the gate by position within the window; zero in models
            without it.
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
        projected: bool = False,
    ) -> None:
        """Store each token's partial state, then the entries of the windows that it completes.

        Args:
            x: [T, hidden], the layer's normalised input; or, with ``projected``, float32 [T, 2 *
                width], this compressor's part of a merged projection.
            step: metadata of the batch.
            state: float32 [P, bs, 2 * width], partial states, written.
            state_group: slots of the states.
            cache: cache pages in ``layout``, written.
            cache_group: slots of the entries.
            layout: layout id of ``cache``.
            hadamard: True to rotate the entry before it is quantised (MXFP4 index keys).
            projected: True if x is projected already.
        """
        ratio, width = self.ape.shape
        if not projected:
            x = linear_float32(x, self.kv_gate, backend=plain_backend(self.backend))
        kv, score = x.split(width, dim=-1)
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
            self.rope.table_for(step.max_seq_len),
            cache,
            cache_group.slot_mapping,
            compress_ratio=ratio,
            overlap=self.overlap,
            layout=layout,
            hadamard=hadamard,
            backend=self.backend,
        )


class LatentCompressor(Compressor):
    """A compressor from whose entries the index keys are projected.

    The entry before its rotation is called the latent and is rounded to the activations' dtype
    once; the cache's row is rotated and quantised from it.
    """

    def latent(
        self, x: Tensor, step: Step, state: Tensor | None, state_group: GroupStep | None
    ) -> Tensor:
        """Return normed entries [T, D] of the tokens that complete one; zero for other tokens.

        Args:
            x: [T, hidden], the layer's normalised input.
            step: metadata of the batch.
            state: float32 [P, bs, 2 * D], partial states, written; None if an entry has one token.
            state_group: slots of the states, or None.
        """
        ratio, width = self.ape.shape
        projected = linear_float32(x, self.kv_gate, backend=plain_backend(self.backend))
        if state is None or state_group is None:
            assert ratio == 1
            normed = rms_norm(projected, self.norm, self.eps, backend=self.backend)
            return normed.to(x.dtype)
        kv, score = projected.split(width, dim=-1)
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
        entries = compress_norm(
            state,
            state_group.block_table,
            state_group.slot_mapping,
            step.token_to_req,
            step.positions,
            self.norm,
            self.eps,
            compress_ratio=ratio,
            overlap=self.overlap,
            backend=self.backend,
        )
        return entries.to(x.dtype)

    def insert(
        self, rows: Tensor, step: Step, cache: Tensor, cache_group: GroupStep, layout: str
    ) -> None:
        """Rotate rows by the first positions of their windows and store those of complete entries.

        Args:
            rows: [T, D], the latent, or keys projected from it.
            step: metadata of the batch.
            cache: cache pages in ``layout``, written.
            cache_group: slots of the rows.
            layout: layout id of ``cache``.
        """
        first = step.positions + (1 - self.ape.shape[0])
        cos_sin = self.rope.table_for(step.max_seq_len)
        rotated = rope(rows.unsqueeze(1), first, cos_sin, backend=self.backend).squeeze(1)
        quantize_and_insert_k_cache(
            rotated, cache, cache_group.slot_mapping, layout=layout, backend=self.backend
        )


def merge_kv_gate(wkv: Tensor, wgate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stack wkv [width, hidden] and wgate [width, hidden] into ``kv_gate``.

    The weight keeps its stored dtype where the product accepts that: on devices with activations of
    the same dtype, and on a CPU if it is small. There a step is bound by memory, and reading half
    as much and converting it takes half the time (2048 x 256, one core). Elsewhere it is float32.

    Args:
        wkv: [width, hidden] weight as stored.
        wgate: [width, hidden] weight as stored, or None.
        dtype: dtype of the activations.
    """
    merged = wkv if wgate is None else torch.cat((wkv, wgate))
    if merged.device.type == "cpu":
        return merged if merged.numel() <= _CONVERTED_ELEMENTS else merged.float()
    return merged if merged.dtype == dtype else merged.float()


class SharedProjection:
    """One product for two compressors' projections of the same input, and for head weights.

    The weights of all become views of the merged one.
    """

    def __init__(self, first: Compressor, second: Compressor, heads: Linear | None = None) -> None:
        parts = [first.kv_gate, second.kv_gate]
        if heads is not None:
            parts.append(heads.packed.weight)
        self._sizes = [len(part) for part in parts]
        self._weight = torch.cat(parts)
        self._backend = first.backend
        first.kv_gate, second.kv_gate, *more = self._weight.split(self._sizes)
        if heads is not None:
            heads.packed = PackedWeight("plain", *more)

    @classmethod
    def of(
        cls, first: Compressor | None, second: Compressor | None, heads: Linear | None = None
    ) -> SharedProjection | None:
        """Merge two compressors' weights if they fit together, else return None.

        Both must have one dtype that a CPU does not convert at every use. The head weights join if
        theirs fits.
        """
        if first is None or second is None:
            return None
        gate = first.kv_gate
        converted = gate.device.type == "cpu" and gate.dtype != torch.float32
        if converted or second.kv_gate.dtype != gate.dtype:
            return None
        joins = heads is not None and heads.packed.weight.dtype == gate.dtype
        return cls(first, second, heads if joins else None)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return float32 [T, 2 * width] for each compressor, and head weights [T, heads] if any."""
        both: Tensor = linear_float32(x, self._weight, backend=plain_backend(self._backend))
        first, second, *more = both.split(self._sizes, dim=-1)
        return first, second, more[0] if more else None
