"""Mixture of experts: routed by token id in the first layers, by score in the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.layers import codes
from anymla.layers.linear import Linear, LinearPair, PackedWeight
from anymla.layers.ranks import ALONE, Ranks
from anymla.layers.step import Step
from anymla.ops.moe import experts, route_biased, route_hash, swiglu
from anymla.ops.streams import deferred_stream_wait


@dataclasses.dataclass(frozen=True)
class Router:
    """Choice of a token's experts.

    Attributes:
        gate: float32 [E, hidden], weight of the scores.
        scale: factor of the normalised weights.
        experts_per_token: k, the number of routed experts of a token.
        bias: float32 [E], added for the choice only; None in layers that route by token id.
        token_experts: int64 [vocab, k], experts of every token id; None in layers that score.
    """

    gate: Tensor
    scale: float
    experts_per_token: int
    bias: Tensor | None = None
    token_experts: Tensor | None = None

    def __call__(self, x: Tensor, step: Step, backend: str | None) -> tuple[Tensor, Tensor]:
        """Return expert ids int32 [T, k] and weights float32 [T, k].

        Padding has no token id and is routed to no expert, because for few tokens every further
        expert costs the reading of its weights. The mask is passed even if there is no padding, so
        that one build of a kernel serves both cases.
        """
        if self.token_experts is not None:
            ids, weights = route_hash(
                x, self.gate, step.token_ids, self.token_experts, scale=self.scale, backend=backend
            )
        else:
            assert self.bias is not None
            ids, weights = route_biased(
                x,
                self.gate,
                self.bias,
                k=self.experts_per_token,
                scale=self.scale,
                is_valid=step.is_valid if step.padded or backend or not x.is_cpu else None,
                backend=backend,
            )
        return ids, weights


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One projection of all experts, one tensor each so that mapped files are read in place.

    Attributes:
        kind: storage format of all weights.
        weights: one tensor for each expert.
        scales: one tensor for each expert; empty for "plain".
        block: rows and columns that share a scale, see ``PackedWeight``.
        global_scales: float32 [E] factors (nvfp4), else None.
    """

    kind: str
    weights: list[Tensor]
    scales: list[Tensor]
    block: int = FP8_BLOCK
    global_scales: Tensor | None = None

    @classmethod
    def of(cls, packed: list[PackedWeight]) -> ExpertWeights:
        """Gather the experts' weights; all must be stored in the same format."""
        kinds, blocks = {each.kind for each in packed}, {each.block for each in packed}
        if len(kinds) != 1 or len(blocks) != 1:
            raise ValueError(f"experts must share one weight format, got {sorted(kinds)}")
        scales = [each.scale for each in packed if each.scale is not None]
        whole = [each.global_scale for each in packed if each.global_scale is not None]
        return cls(
            kinds.pop(),
            [each.weight for each in packed],
            scales,
            blocks.pop(),
            torch.cat(whole) if whole else None,
        )


class SharedExpert(nn.Module):
    """The expert that every token passes through."""

    def __init__(
        self, *, w1: Linear, w2: Linear, w3: Linear, limit: float, backend: str | None = None
    ) -> None:
        super().__init__()
        self.w1_w3 = LinearPair(w1, w3)
        self.w2 = w2
        self.limit = limit
        self.backend = backend

    def forward(self, x: Tensor, quantised: QuantizedRows | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden]; x may be given in FP8 as well."""
        gate, up = self.w1_w3(x, quantised)
        coded = codes.allocate(self.w2.reads_codes, gate)
        inner = swiglu(gate, up, self.limit, backend=self.backend, **codes.as_kwargs(coded))
        out: Tensor = self.w2(inner, coded)
        return out


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared one.

    Attributes:
        index: index of the layer, for the recorder.
        router: choice of the experts.
        w1, w2, w3: gate, down and up projections of the routed experts.
        shared: the shared expert, or this rank's part of it, or None.
        expert_offset: number of the first expert on this rank.
        ranks: ranks that have the other experts.
    """

    def __init__(
        self,
        *,
        index: int,
        router: Router,
        w1: ExpertWeights,
        w2: ExpertWeights,
        w3: ExpertWeights,
        shared: SharedExpert | None,
        limit: float,
        quantize_activations: bool,
        expert_offset: int = 0,
        ranks: Ranks = ALONE,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.router = router
        self.w1 = w1
        self.w2 = w2
        self.w3 = w3
        self.shared = shared
        self.limit = limit
        self.quantize_activations = quantize_activations
        self.expert_offset = expert_offset
        self.ranks = ranks
        self.backend = backend
        # The usual block size and absent global scales are left to the operation's defaults.
        block = w1.block
        self._more: dict[str, Any] = {} if block == FP8_BLOCK else {"quant_block": block}
        whole = [each.global_scales for each in (w1, w3, w2) if each.global_scales is not None]
        if whole:
            self._more["global_scales"] = torch.stack(whole, 1).contiguous()

    @property
    def reads_codes(self) -> bool:
        """True if it saves a launch to pass the input in quantised form as well."""
        return self.shared is not None and self.shared.w1_w3.reads_codes

    def forward(self, x: Tensor, step: Step, quantised: QuantizedRows | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden]; routing by token id needs the step's ids.

        The shared expert may run in parallel with the router and the routed experts
        (``step.side``), which wait for it before they add its output.
        """
        with step.side.beside():
            shared = None if self.shared is None else self.shared(x, quantised)
        ids, weights = self.router(x, step, self.backend)
        if step.recorder is not None:
            step.recorder("experts", self.index, ids)
        with deferred_stream_wait(step.side.join):
            out: Tensor = experts(
                x,
                ids,
                weights,
                self.w1.weights,
                self.w3.weights,
                self.w2.weights,
                self.w1.scales,
                self.w3.scales,
                self.w2.scales,
                weight_format=self.w1.kind,
                swiglu_limit=self.limit,
                quantize_activations=self.quantize_activations,
                expert_offset=self.expert_offset,
                shared=shared,
                backend=self.backend,
                **self._more,
            )
        return self.ranks.total(out)
