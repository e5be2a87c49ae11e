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

# Converted to float32 at every use up to here: 2 MiB of it stay in a core's cache.
_CONVERTED_ELEMENTS = 1 << 19


class Compressor(nn.Module):
    """Main compressor of a layer, or the index compressor inside an indexer.

    Attributes:
        kv_gate: [2 * width, hidden], rows of wkv then of wgate, see ``merge_kv_gate``. Its product
            is float32: the pooling weights are exponentials of it. [width, hidden] where entries
            are of one token, which needs no weight.
        ape: float32 [ratio, width], added to the gate by position within the window; zero in models
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
        """Store each token's partial state, then the entries of the windows that it closes.

        Args:
            x: [T, hidden], the layer's normalised input; or, of a compressor whose projection is
                taken together with another's, float32 [T, 2 * width], the result of its own.
            step: the batch.
            state: float32 [P, bs, 2 * width], written.
            state_group: where the states go.
            cache: pages of ``layout``, written.
            cache_group: where the entries go.
            layout: layout id of ``cache``.
            hadamard: rotate the entry before it is quantised (MXFP4 index keys).
            projected: what x is.
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
    """A compressor whose entries are also what index keys are projected from.

    The entry before its rotation, called the latent, is rounded to the activations' dtype once; the
    cache's row is rotated and coded from that.
    """

    def latent(
        self, x: Tensor, step: Step, state: Tensor | None, state_group: GroupStep | None
    ) -> Tensor:
        """Normed entries [T, D] of the tokens that close one; zero for the others.

        Args:
            x: [T, hidden], the layer's normalised input.
            step: the batch.
            state: float32 [P, bs, 2 * D], written; None where entries are of one token.
            state_group: where the states go, or None.
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
        """Rotate rows by the first positions of their windows and store those that close one.

        Args:
            rows: [T, D], the latent, or keys projected from it.
            step: the batch.
            cache: pages of ``layout``, written.
            cache_group: where the rows go.
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

    It stays as stored where the product takes it so: on devices with activations of the same
    dtype, and on a CPU if it is small: there a step waits for memory, and reading half as much and
    converting it takes half the time (2048 x 256, one core). Elsewhere it is float32.

    Args:
        wkv: as stored.
        wgate: as stored, or None.
        dtype: of the activations.
    """
    merged = wkv if wgate is None else torch.cat((wkv, wgate))
    if merged.device.type == "cpu":
        return merged if merged.numel() <= _CONVERTED_ELEMENTS else merged.float()
    return merged if merged.dtype == dtype else merged.float()


class SharedProjection:
    """The projections of two compressors of one input, and of head weights, as one product.

    The weights of all become views of the common one.
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
        """Of two compressors whose weights go together, else None; heads join if theirs does.

        They are of one dtype, and not of those that a CPU converts at every use.
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
        """Float32 [T, 2 * width] of each compressor; head weights [T, heads], or None."""
        both: Tensor = linear_float32(x, self._weight, backend=plain_backend(self._backend))
        first, second, *more = both.split(self._sizes, dim=-1)
        return first, second, more[0] if more else None
