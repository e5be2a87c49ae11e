"""The attention of a layer of DeepSeek-V4 or V4.1 with gradients, under checkpoint names."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anymla.formats.page_layout import INDEX_MXFP4
from anymla.layers.caches import CacheFormat
from anymla.layers.rope_table import RopeTable
from anymla.layers.selection import TwoLevels
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


@dataclasses.dataclass
class Shared:
    """Tensors that later layers of DeepSeek-V4.1 read of earlier ones in a forward pass, by layer.

    Gradients of all layers that read an entry add up in float32.

    Attributes:
        entries: entries as the cache gives them back, [E, D] float32 (or float64).
        keys: rotated index keys, [E, Di].
        lists: selected entries, [T, K] int32; None for all that a token sees.
        blocks: blocks of entries to select within, [T, n] int32; none if all are kept.
    """

    entries: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    keys: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    lists: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    blocks: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class Attention(nn.Module):
    """Attention of one layer of DeepSeek-V4 or V4.1: window, compressed entries and sink.

    Parameters have the names and shapes of a checkpoint's ``layers.N.attn.``. With the weights of
    an engine, outputs are those that the engine computes for the same prompts, bit for bit, as far
    as linear layers are: rows, entries and index keys go through the cache's coding, and attention
    is the operation that serves. Layers of V4.1 that share entries or selections pass on a
    ``Shared``.

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
        """
        super().__init__()
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
        if spec.compresses:
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
        shared: Shared | None = None,
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
            shared: tensors of earlier layers of this forward pass, to which the layer adds its own;
                None for layers that share nothing.
            deterministic: argument of ``train.attention``.

        Returns:
            Output, index loss and lists.

        Raises:
            ValueError: the plan has another ratio or window.
            KeyError: the layer's entries or selection are another layer's that ``shared`` lacks.
        """
        spec = self.spec
        shared = Shared() if shared is None else shared
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
        q, rows = heads_and_rows(
            q, kv, at, table, eps=self.eps, layout=self.format.main, norms=spec.norms_heads
        )
        if self.compressor is not None:
            self._compress(x, plan, angles, shared, learns=learns)
        entries = None
        if spec.ratio:
            entries = shared.entries[self._source].to(q.dtype)
        index = None
        if self.indexer is not None:
            if not spec.latent_keys:
                shared.keys[spec.index] = self.indexer.pooled(x, plan, angles, learns=learns)
            index = self.indexer.inputs(x, latent, shared.keys[self._source], learns=learns)
            dense = self.index_stage == "dense" or plan.most_entries <= spec.selection_width
            if lists is None and not dense:
                lists = self.indexer.select(index, plan, angles, self.format.index, shared)
            shared.lists[spec.index] = lists
        elif spec.index_source is not None and lists is None:
            lists = shared.lists[spec.index_source]
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

    @property
    def _source(self) -> int:
        """Layer whose entries and index keys are read."""
        return self.spec.index if self.spec.kv_source is None else self.spec.kv_source

    def _compress(
        self, x: Tensor, plan: Plan, angles: _Angles, shared: Shared, *, learns: bool
    ) -> None:
        """Add the layer's entries, and the index keys that are projected from them."""
        assert self.compressor is not None
        spec = self.spec
        entries = self.compressor(x, plan, angles)
        if spec.latent_keys:
            if self.indexer is not None:
                shared.keys[spec.index] = self.indexer.projected(
                    entries, plan, angles, learns=learns
                )
            entries = angles.of_entries(entries, plan)
        wide = torch.promote_types(entries.dtype, torch.float32)
        shared.entries[spec.index] = round_rows(entries, self.format.entries, dtype=wide)


class _Angles(NamedTuple):
    """Rotary table, positions of tokens [T], and of entries [E] (None for those of the plan)."""

    table: Tensor
    tokens: Tensor
    entries: Tensor | None

    def of_entries(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rotate rows [E, D] of entries."""
        at = windows_of(plan).start if self.entries is None else self.entries
        return rope(rows.unsqueeze(1), at, self.table).squeeze(1)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Compressor(nn.Module):
    """The compressor of entries, or of index keys, of ``width`` channels.

    Its entries are rotated, or, where index keys are projected from them, not yet.
    """

    def __init__(self, spec: LayerSpec, sizes: Sizes, width: int, made: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        wide = width * (2 if spec.overlap else 1)
        self.wkv = nn.Linear(sizes.hidden_size, wide, **made)
        self.wgate = nn.Linear(sizes.hidden_size, wide, **made) if spec.keeps_states else None
        ape = torch.zeros(spec.ratio, wide, device=made["device"])
        if spec.position_bias:
            self.ape = nn.Parameter(ape)
        else:
            self.register_buffer("ape", ape, persistent=False)
        self.norm = _Norm(width, sizes.rms_norm_eps, made["device"])

    def forward(self, x: Tensor, plan: Plan, angles: _Angles) -> Tensor:
        latent = self.spec.latent_keys
        if self.wgate is None:  # an entry of one token
            entries = self.norm(linear_float32(x[: plan.num_entries], self.wkv.weight))
        else:
            both = linear_float32(x, torch.cat((self.wkv.weight, self.wgate.weight)))
            kv, gate = both.split(self.ape.shape[1], dim=-1)
            entries = compress(
                kv, gate, self.ape, self.norm.weight, plan, eps=self.norm.eps,
                rope=None if latent else angles.table, positions=angles.entries,
            )  # fmt: skip
        return entries.to(x.dtype) if latent else entries


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
        if spec.keeps_keys and spec.latent_keys:
            self.wk = nn.Linear(sizes.head_dim, width, **made)
            self.k_norm = _Norm(width, sizes.rms_norm_eps, made["device"])
        elif spec.keeps_keys:
            self.compressor = _Compressor(spec, sizes, width, made)

    def pooled(self, x: Tensor, plan: Plan, angles: _Angles, *, learns: bool) -> Tensor:
        """Pool rotated index keys [E, Di] from the detached input; no graph unless it learns."""
        with torch.set_grad_enabled(learns):
            keys: Tensor = self.compressor(x.detach(), plan, angles)
            return keys

    def projected(self, latent: Tensor, plan: Plan, angles: _Angles, *, learns: bool) -> Tensor:
        """Project rotated index keys [E, Di] from detached entries before their rotation."""
        with torch.set_grad_enabled(learns):
            return angles.of_entries(self.k_norm(self.wk(latent.detach())), plan)

    def inputs(self, x: Tensor, latent: Tensor, keys: Tensor, *, learns: bool) -> _IndexInputs:
        """Project queries and weights of detached inputs; no graph unless it learns."""
        with torch.set_grad_enabled(learns):
            q = self.wq_b(latent.detach()).unflatten(-1, (self.heads, -1))
            return _IndexInputs(q, keys, self.weights_proj(x.detach()))

    def select(
        self, index: _IndexInputs, plan: Plan, angles: _Angles, layout: str, shared: Shared
    ) -> Tensor:
        """Select each token's entries as an engine does."""
        q, candidates, levels = index.q, self.spec.candidates, None
        if candidates is not None and candidates.narrows(plan.most_entries):
            keeps = candidates.source == self.spec.index
            if keeps:
                size = plan.tokens, candidates.blocks
                shared.blocks[candidates.source] = plan.ranges.new_full(size, -1)
            levels = TwoLevels(shared.blocks[candidates.source], candidates.block_size, keeps)
        return select_entries(
            q, index.keys, index.weights, plan, angles.table, width=self.spec.selection_width,
            layout=layout, positions=angles.tokens, quantize=q.dtype != torch.float32,
            hadamard=self.spec.hadamard, levels=levels,
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
