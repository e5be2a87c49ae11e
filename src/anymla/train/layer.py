"""The attention of one DeepSeek-V4 layer as a module with gradients, under checkpoint names."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anymla.formats.page_layout import INDEX_MXFP4
from anymla.layers.caches import CacheFormat
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import LayerSpec
from anymla.train.attention import attention
from anymla.train.compressor import compress
from anymla.train.indexer import index_loss, select_entries
from anymla.train.norm_rope import rms_norm, rope
from anymla.train.plan import Plan
from anymla.train.projection import grouped_projection, linear_float32
from anymla.train.rows import heads_and_rows, round_rows
from anymla.train.windows import windows_of

IndexStage = Literal["frozen", "sparse", "dense"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model's attention, in the spelling of ``config.json``."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    rms_norm_eps: float

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """Read the attributes of a ``ModelConfig``, or of another object that has them."""
        return cls(**{each.name: getattr(config, each.name) for each in dataclasses.fields(cls)})


class Attended(NamedTuple):
    """Results of a layer's attention.

    Attributes:
        out: output of the layer, [T, hidden].
        index_loss: divergence of the indexer from the heads; None if nothing learns from it.
        lists: entries that each token attended to, [T, K] int32; None for all that it sees.
    """

    out: Tensor
    index_loss: Tensor | None
    lists: Tensor | None


class Attention(nn.Module):
    """Attention of one layer of DeepSeek-V4: window, compressed entries and sink.

    Parameters have the names and shapes of a checkpoint's ``layers.N.attn.``. With the weights of
    an engine, outputs are those that the engine computes for the same prompts, bit for bit, as far
    as linear layers are: rows, entries and index keys go through the cache's coding, and attention
    is the operation that serves.

    Attributes:
        spec: description of the layer.
        format: layouts of the caches whose rounding is reproduced.
        index_stage: "frozen": the indexer selects and does not learn. "sparse": it learns over the
            entries that it selects. "dense": warm-up; heads attend to all entries, and it learns
            over all.
    """

    def __init__(
        self,
        spec: LayerSpec,
        sizes: Sizes,
        rope: RopeTable,
        format: CacheFormat,
        *,
        index_stage: IndexStage = "frozen",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the parameters, uninitialised but for norms and sinks.

        Args:
            spec: description of the layer, from ``model.layer_specs``.
            sizes: sizes of the model.
            rope: rotary table of the layer: the model's compressed one if ``spec.ratio`` is set.
            format: layouts of the caches, of ``layers.caches.CACHE_FORMATS``.
            index_stage: "frozen", "sparse" or "dense"; see the attribute.
            dtype: dtype of the matrices; ape, norms and sinks are float32.
            device: device of the parameters.

        Raises:
            ValueError: a layer of V4.1, which shares entries or projects its index keys from them.
        """
        super().__init__()
        shared = spec.kv_source, spec.index_source, spec.candidates
        if spec.latent_keys or any(each is not None for each in shared):
            raise ValueError(
                f"Attention: layer {spec.index} must be one of DeepSeek-V4, got V4.1's"
            )
        self.spec, self.format, self.index_stage = spec, format, index_stage
        self.heads, self.groups, self.eps = (
            sizes.num_attention_heads, sizes.o_groups, sizes.rms_norm_eps,
        )  # fmt: skip
        self.rope = rope
        made: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        width = sizes.head_dim
        inner = sizes.o_groups * sizes.o_lora_rank
        self.wq_a = nn.Linear(sizes.hidden_size, sizes.q_lora_rank, **made)
        self.wq_b = nn.Linear(sizes.q_lora_rank, self.heads * width, **made)
        self.wkv = nn.Linear(sizes.hidden_size, width, **made)
        self.wo_a = nn.Linear(self.heads // self.groups * width, inner, **made)
        self.wo_b = nn.Linear(inner, sizes.hidden_size, **made)
        self.q_norm = _Norm(sizes.q_lora_rank, self.eps, device)
        self.kv_norm = _Norm(width, self.eps, device)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads, device=device))
        self.compressor = self.indexer = None
        if spec.ratio:
            self.compressor = _Compressor(spec, sizes, width, made)
        if spec.selects:
            self.indexer = _Indexer(spec, sizes, made)

    def forward(
        self,
        x: Tensor,
        plan: Plan,
        *,
        positions: Tensor | None = None,
        lists: Tensor | None = None,
        token_weights: Tensor | None = None,
        deterministic: bool | None = None,
    ) -> Attended:
        """Attend each token of a packed batch.

        Args:
            x: the layer's normalised input, [T, hidden].
            plan: plan of the batch, of the spec's ratio and window.
            positions: positions for the rotary table, [T] int64, of sequences with gaps; None for
                those of the plan. The table must have been grown to them.
            lists: entries to attend to instead of the indexer's choice, [T, K] int32, as an engine
                chose them; None to select here.
            token_weights: weights of the tokens in the index loss, [T] float32; None for 1 / T.
            deterministic: argument of ``train.attention``.

        Returns:
            Output, index loss and lists.

        Raises:
            ValueError: the plan has another ratio or window.
        """
        spec = self.spec
        if (plan.ratio, plan.window) != (spec.ratio, spec.window):
            got = f"ratio {plan.ratio} and window {plan.window}"
            raise ValueError(
                f"Attention: plan must have ratio {spec.ratio}, window {spec.window}, got {got}"
            )
        at = plan.positions.long() if positions is None else positions
        table = self.rope.table_for(plan.tokens)
        firsts = None
        if positions is not None and spec.ratio:
            firsts = windows_of(plan).first(positions)
        angles = _Angles(table, at, firsts)
        learns = self.index_stage != "frozen" and torch.is_grad_enabled()
        latent = self.q_norm(self.wq_a(x))
        kv = self.kv_norm(self.wkv(x))
        q = self.wq_b(latent).unflatten(-1, (self.heads, -1))
        q, rows = heads_and_rows(q, kv, at, table, eps=self.eps, layout=self.format.main)
        entries = None
        if self.compressor is not None:
            pooled = self.compressor(x, plan, angles)
            entries = round_rows(pooled, self.format.entries, dtype=q.dtype)
        index = None
        if self.indexer is not None:
            index = self.indexer.inputs(x, latent, plan, angles, learns=learns)
            dense = self.index_stage == "dense" or plan.most_entries <= spec.selection_width
            if lists is None and not dense:
                lists = self.indexer.select(index, plan, angles, self.format.index)
        o, lse = attention(
            q, rows, entries, plan, lists, self.attn_sink, deterministic=deterministic
        )
        wo_a = self.wo_a.weight.unflatten(0, (self.groups, -1))
        out = self.wo_b(grouped_projection(o, wo_a, at, table))
        loss = None
        if learns and self.indexer is not None and index is not None and entries is not None:
            iq, ik, weights = self.indexer.rounded(index, angles, self.format.index)
            loss = index_loss(
                iq, ik, weights, plan, q, entries, lse, self.attn_sink, lists=lists,
                token_weights=token_weights,
            )  # fmt: skip
        return Attended(out, loss, lists)


class _Angles(NamedTuple):
    """Rotary table, positions of tokens [T], and of entries [E] (None for those of the plan)."""

    table: Tensor
    tokens: Tensor
    entries: Tensor | None


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Compressor(nn.Module):
    """The compressor of entries, or of index keys, of ``width`` channels."""

    def __init__(self, spec: LayerSpec, sizes: Sizes, width: int, made: dict[str, Any]) -> None:
        super().__init__()
        wide = width * (2 if spec.overlap else 1)
        self.wkv = nn.Linear(sizes.hidden_size, wide, **made)
        self.wgate = nn.Linear(sizes.hidden_size, wide, **made)
        self.ape = nn.Parameter(torch.zeros(spec.ratio, wide, device=made["device"]))
        self.norm = _Norm(width, sizes.rms_norm_eps, made["device"])

    def forward(self, x: Tensor, plan: Plan, angles: _Angles) -> Tensor:
        both = linear_float32(x, torch.cat((self.wkv.weight, self.wgate.weight)))
        kv, gate = both.split(self.ape.shape[1], dim=-1)
        return compress(
            kv, gate, self.ape, self.norm.weight, plan, eps=self.norm.eps, rope=angles.table,
            positions=angles.entries,
        )  # fmt: skip


class _IndexInputs(NamedTuple):
    """Index queries before rotation [T, Hi, Di], rotated keys [E, Di], head weights [T, Hi]."""

    q: Tensor
    keys: Tensor
    weights: Tensor


class _Indexer(nn.Module):
    def __init__(self, spec: LayerSpec, sizes: Sizes, made: dict[str, Any]) -> None:
        super().__init__()
        self.spec, self.heads = spec, sizes.index_n_heads
        width = sizes.index_head_dim
        self.wq_b = nn.Linear(sizes.q_lora_rank, self.heads * width, **made)
        self.weights_proj = nn.Linear(sizes.hidden_size, self.heads, **made)
        self.compressor = _Compressor(spec, sizes, width, made)

    def inputs(
        self, x: Tensor, latent: Tensor, plan: Plan, angles: _Angles, *, learns: bool
    ) -> _IndexInputs:
        """Project queries, keys and weights of detached inputs; no graph unless it learns."""
        with torch.set_grad_enabled(learns):
            x = x.detach()
            q = self.wq_b(latent.detach()).unflatten(-1, (self.heads, -1))
            return _IndexInputs(q, self.compressor(x, plan, angles), self.weights_proj(x))

    def select(self, index: _IndexInputs, plan: Plan, angles: _Angles, layout: str) -> Tensor:
        """Select each token's entries as an engine does."""
        q = index.q
        return select_entries(
            q, index.keys, index.weights, plan, angles.table, width=self.spec.selection_width,
            layout=layout, positions=angles.tokens, quantize=q.dtype != torch.float32,
            hadamard=self.spec.hadamard,
        )  # fmt: skip

    def rounded(
        self, index: _IndexInputs, angles: _Angles, layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and weights as they enter the scores, straight through."""
        hadamard = self.spec.hadamard and layout == INDEX_MXFP4
        q = rope(index.q, angles.tokens, angles.table)
        if q.dtype != torch.float32:
            q = round_rows(q.flatten(0, 1), layout, hadamard=hadamard).view_as(q)
        keys = round_rows(index.keys, layout, dtype=q.dtype, hadamard=hadamard)
        factor = q.shape[2] ** -0.5 * self.heads**-0.5
        return q, keys, index.weights.float() * factor
