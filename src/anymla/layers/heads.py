"""The heads of attention over the rows that are chosen for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.layers.caches import LayerCache
from anymla.layers.plans import Plans
from anymla.layers.rows import PrefillRows, RequestRows, Rows
from anymla.layers.spec import WINDOW_GROUP, LayerSpec
from anymla.layers.step import Step
from anymla.ops.attention import (
    CacheRows,
    InverseRopeQuant,
    prefill_attention,
    sparse_attention,
)
from anymla.ops.attention.plan import quantises_in_one_kernel
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.streams import scratch_scope


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Caches, listed rows and plans of a step's attention in one layer.

    Attributes:
        cache: the layer's caches.
        window: rows of the window.
        entries: rows of compressed entries, or None.
        plans: plans of the step's attention by slots.
        kind: name of the plan that layers with the same lists share; None for the window alone.
        chunk: the workspace of the step's prefill, or of its decodes, or None: all is attended to
            by slots.
        selected: int32 [T, K], what the indexer chose of the workspace's entries; None for all.
    """

    cache: LayerCache
    window: Rows
    entries: Rows | None
    plans: Plans
    kind: str | None
    chunk: PrefillRows | RequestRows | None = None
    selected: Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: LayerSpec,
        step: Step,
        cache: LayerCache,
        entries: Rows | None,
        selected: Tensor | None,
    ) -> AttentionInputs:
        """Collect the inputs of all tokens of a step; see the attributes."""
        kind = spec.listed
        name = kind or WINDOW_GROUP
        return cls(cache, step.window, entries, step.plans, kind, step.chunks.get(name), selected)

    def cache_rows(self) -> list[CacheRows]:
        """Return the rows of the window, and of compressed entries if the layer has any."""
        formats = self.cache.format
        rows = [self.window.in_cache(self.cache.window, formats.main)]
        if self.entries is not None:
            assert self.cache.compressed is not None
            rows.append(self.entries.in_cache(self.cache.compressed, formats.entries))
        return rows

    @property
    def decodes(self) -> int:
        """Tokens in front of the workspace's."""
        return 0 if self.chunk is None else self.chunk.first_token

    def by_slots(self) -> AttentionInputs:
        """Return the inputs of the tokens in front of the workspace's, which attend by slots."""
        before = self.decodes
        entries = None if self.entries is None else self.entries.first(before)
        return dataclasses.replace(
            self, window=self.window.first(before), entries=entries, chunk=None, selected=None
        )

    def prefilled(
        self, dtype: torch.dtype, backend: str | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the workspace's arguments to attention: rows, ranges, chosen.

        The rows lie in scratch memory.
        """
        assert self.chunk is not None
        rows = self.chunk.decode(self.cache, dtype, backend)
        chosen = None if self.selected is None else self.selected[self.decodes :]
        return rows, self.chunk.ranges, chosen


class Heads:
    """Query heads that share one key, which is their value as well.

    Attributes:
        sink: float32 [H], a logit in every softmax that carries no value.
        groups: the groups in which outputs are quantised.
        backend: name of every operation's backend; None for the best.
    """

    def __init__(self, sink: Tensor, groups: int, backend: str | None) -> None:
        """See the attributes."""
        self.sink = sink
        self.groups = groups
        self.backend = backend

    @property
    def count(self) -> int:
        """Number of query heads."""
        return len(self.sink)

    def attend(self, q: Tensor, inputs: AttentionInputs) -> Tensor:
        """Outputs [T, H, D]: by slots, and from one workspace where the step has one."""
        chunk = inputs.chunk
        if chunk is None:
            return self._by_slots(q, self._given(inputs))
        out = torch.empty_like(q)
        before = inputs.decodes
        if before:
            self._by_slots(q[:before], self._given(inputs.by_slots()), out[:before])
        with scratch_scope():
            prefill_attention(
                q[before:],
                *inputs.prefilled(q.dtype, self.backend),
                window=chunk.window,
                entries=chunk.entries,
                sink=self.sink,
                out=out[before:],
                backend=self.backend,
            )
        return out

    def quantised(
        self, q: Tensor, inputs: AttentionInputs, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend, rotate back and quantise; return codes and scales by group."""
        chunk = inputs.chunk
        if chunk is None:
            return self._quantised_by_slots(q, inputs, positions, cos_sin)
        before = inputs.decodes
        with scratch_scope():
            quantised = prefill_attention(
                q[before:],
                *inputs.prefilled(q.dtype, self.backend),
                window=chunk.window,
                entries=chunk.entries,
                sink=self.sink,
                epilogue=InverseRopeQuant(positions[before:], cos_sin, self.groups),
                backend=self.backend,
            )
        if not before:
            return quantised
        codes, scales = self._quantised_by_slots(
            q[:before], inputs.by_slots(), positions[:before], cos_sin
        )
        # Not every device joins tensors of float8.
        together = torch.cat((codes.view(torch.uint8), quantised[0].view(torch.uint8)))
        return together.view(codes.dtype), torch.cat((scales, quantised[1]))

    def _by_slots(self, q: Tensor, given: dict[str, Any], out: Tensor | None = None) -> Tensor:
        return sparse_attention(q, **given, out=out, backend=self.backend)[0]

    def _quantised_by_slots(
        self, q: Tensor, inputs: AttentionInputs, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend by slots, rotate back and quantise, in one operation where a kernel does that."""
        given, epilogue = self._given(inputs), InverseRopeQuant(positions, cos_sin, self.groups)
        if self.backend is None and quantises_in_one_kernel(q, **given, epilogue=epilogue):
            return sparse_attention(q, **given, epilogue=epilogue)
        return inverse_rope_fp8_quant(
            self._by_slots(q, given), positions, cos_sin, n_groups=self.groups, backend=self.backend
        )

    def _given(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Return the arguments of attention by slots after its queries."""
        return {"rows": inputs.cache_rows(), "sink": self.sink, "plan": self._plan(inputs)}

    def _plan(self, inputs: AttentionInputs) -> Tensor | None:
        """Return the plan that layers of this kind share; None if a backend is named."""
        if self.backend is not None:
            return None
        return inputs.plans.of(inputs.kind, self.count, inputs.window, inputs.entries)
