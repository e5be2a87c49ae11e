"""DeepSeek-V4 in a differentiable form: packed sequences, no pages, gradients everywhere.

The same mathematics as ``anymla``'s model, under the same tensor names. Attention, its rounded rows
and entries, hyper-connections and the indexer's loss are those of ``anymla.train``; every expert
runs for every token. What rounds in use (FP8 and MXFP4 weights, FP8 cache rows) can be rounded here
as well, with gradients passed straight through.

The indexer learns apart from the rest: its inputs are detached, and its loss is the KL divergence
from the attention that the heads together pay to the compressed entries (as in DeepSeek's report on
V3.2). The heads attend to all entries while it is young, then to its top-k.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from anymla import train
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import LayerSpec
from anymla.ops.norm_rope.rope_tables import YarnScaling
from anymla.train.layer import Sizes

# Positions that the rotary tables hold; those of training jump up to 34,816.
LONGEST = 65536
# Matrices of attention that are stored in FP8; and those that are used in the activations' dtype.
_FP8 = re.compile(r"(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$")
_POOLED = re.compile(r"compressor\.\w+\.weight$")


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of a ``config.json`` in DeepSeek's spelling that the network needs."""

    vocab: int
    hidden: int
    ratios: tuple[int, ...]
    drafts: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    groups: int
    o_lora: int
    window: int
    index_heads: int
    index_dim: int
    topk: int
    experts: int
    experts_per_token: int
    moe_size: int
    hash_layers: int
    routed_scale: float
    limit: float
    streams: int
    iterations: int
    hc_eps: float
    eps: float
    theta: float
    compress_theta: float
    yarn: tuple[float, int, float, float]

    @classmethod
    def of(cls, config: dict) -> Numbers:
        """Read a configuration."""
        scaling = config["rope_scaling"]
        drafts = config["num_nextn_predict_layers"]
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            ratios=tuple(config["compress_ratios"][: config["num_hidden_layers"]]),
            drafts=drafts,
            heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            q_lora=config["q_lora_rank"],
            groups=config["o_groups"],
            o_lora=config["o_lora_rank"],
            window=config["sliding_window"],
            index_heads=config["index_n_heads"],
            index_dim=config["index_head_dim"],
            topk=config["index_topk"],
            experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            moe_size=config["moe_intermediate_size"],
            hash_layers=config["num_hash_layers"],
            routed_scale=config["routed_scaling_factor"],
            limit=config["swiglu_limit"],
            streams=config["hc_mult"],
            iterations=config["hc_sinkhorn_iters"],
            hc_eps=config["hc_eps"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
            compress_theta=config["compress_rope_theta"],
            yarn=(
                scaling["factor"],
                scaling["original_max_position_embeddings"],
                scaling["beta_fast"],
                scaling["beta_slow"],
            ),
        )

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """Prefix and ratio of every decoder layer, draft layers last."""
        out = [(f"layers.{i}.", ratio) for i, ratio in enumerate(self.ratios)]
        return out + [(f"mtp.{i}.", 0) for i in range(self.drafts)]


def initial(n: Numbers, seed: int) -> dict[str, Tensor]:
    """Trainable tensors in float32, by their checkpoint names; a layer's experts as one tensor."""
    g = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}

    def normal(name: str, *shape: int, std: float | None = None) -> None:
        std = shape[-1] ** -0.5 if std is None else std
        out[name] = torch.randn(*shape, generator=g) * std

    def gates(prefix: str, site: int | None) -> None:
        mixes = n.streams if site is None else (2 + n.streams) * n.streams
        normal(f"{prefix}_fn", mixes, n.streams * n.hidden, std=0.01)
        base = torch.randn(mixes, generator=g) * 0.3
        if site is None:
            base -= 1.0
        else:  # read mostly one stream, write to all, leave them apart
            base[: n.streams] -= 2.5
            base[site % n.streams] += 4.0
            base[2 * n.streams :] += 4.0 * torch.eye(n.streams).flatten()
        out[f"{prefix}_base"] = base
        out[f"{prefix}_scale"] = torch.ones(1 if site is None else 3)

    normal("embed.weight", n.vocab, n.hidden, std=1.0)
    normal("head.weight", n.vocab, n.hidden, std=0.5 * n.hidden**-0.5)
    out["norm.weight"] = torch.ones(n.hidden)
    gates("hc_head", None)
    depth = (2 * len(n.blocks)) ** -0.5
    for index, (p, ratio) in enumerate(n.blocks):
        normal(p + "attn.wq_a.weight", n.q_lora, n.hidden)
        normal(p + "attn.wq_b.weight", n.heads * n.head_dim, n.q_lora)
        normal(p + "attn.wkv.weight", n.head_dim, n.hidden)
        normal(p + "attn.wo_a.weight", n.groups * n.o_lora, n.heads // n.groups * n.head_dim)
        normal(
            p + "attn.wo_b.weight",
            n.hidden,
            n.groups * n.o_lora,
            std=depth * (n.groups * n.o_lora) ** -0.5,
        )
        out[p + "attn.q_norm.weight"] = torch.ones(n.q_lora)
        out[p + "attn.kv_norm.weight"] = torch.ones(n.head_dim)
        out[p + "attn.attn_sink"] = torch.zeros(n.heads)
        pools = {"attn.compressor.": n.head_dim} if ratio else {}
        if ratio == 4:
            pools["attn.indexer.compressor."] = n.index_dim
            normal(p + "attn.indexer.wq_b.weight", n.index_heads * n.index_dim, n.q_lora)
            normal(p + "attn.indexer.weights_proj.weight", n.index_heads, n.hidden)
        for name, dim in pools.items():
            width = dim * (2 if ratio == 4 else 1)
            normal(p + name + "wkv.weight", width, n.hidden)
            normal(p + name + "wgate.weight", width, n.hidden)
            normal(p + name + "ape", ratio, width, std=0.5)
            out[p + name + "norm.weight"] = torch.ones(dim)
            if dim == n.head_dim:
                # Entries begin as pooled window rows: what finds a row finds its entry.
                rows = out[p + "attn.wkv.weight"]
                out[p + name + "wkv.weight"] = torch.cat([rows] * (width // dim))
        out[p + "attn_norm.weight"] = torch.ones(n.hidden)
        out[p + "ffn_norm.weight"] = torch.ones(n.hidden)
        gates(p + "hc_attn", 2 * index)
        gates(p + "hc_ffn", 2 * index + 1)
        normal(p + "ffn.gate.weight", n.experts, n.hidden, std=0.5 * n.hidden**-0.5)
        for name, count in (("ffn.experts.", n.experts), ("ffn.shared_experts.", 1)):
            size = (count,) if name == "ffn.experts." else ()
            normal(p + name + "w1.weight", *size, n.moe_size, n.hidden)
            normal(p + name + "w3.weight", *size, n.moe_size, n.hidden)
            normal(
                p + name + "w2.weight", *size, n.hidden, n.moe_size, std=depth * n.moe_size**-0.5
            )
        if p.startswith("mtp."):
            normal(p + "e_proj.weight", n.hidden, n.hidden, std=0.7 * n.hidden**-0.5)
            normal(p + "h_proj.weight", n.hidden, n.hidden, std=0.7 * n.hidden**-0.5)
            for name in ("enorm", "hnorm", "norm"):
                out[p + f"{name}.weight"] = torch.ones(n.hidden)
            gates(p + "hc_head", None)
    return out


def fixed(n: Numbers, seed: int) -> dict[str, Tensor]:
    """What no gradient changes: tables of experts by token, and biases that balance experts."""
    g = torch.Generator().manual_seed(seed + 1)
    out = {}
    for index, (p, _) in enumerate(n.blocks):
        if index < n.hash_layers:
            order = torch.rand(n.vocab, n.experts, generator=g).argsort(1)
            out[p + "ffn.gate.tid2eid"] = order[:, : n.experts_per_token].contiguous()
        else:
            out[p + "ffn.gate.bias"] = torch.zeros(n.experts)
    return out


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value with the gradient of x."""
    return x + (rounded - x).detach()


def _power(amax: Tensor, largest: float) -> Tensor:
    """2 ** ceil(log2(amax / largest)), exact."""
    mantissa, exponent = torch.frexp(amax.float() / largest)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def round_e4m3(x: Tensor) -> Tensor:
    """To the nearest e4m3 value, saturating, without a cast that a CPU may lack."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def round_fp8_weight(w: Tensor) -> Tensor:
    """Blocks of 128 x 128 of [N, K] in e4m3 with power-of-two scales."""
    rows, columns = w.shape
    padded = F.pad(w, (0, -columns % 128, 0, -rows % 128))
    parts = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = _power(parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-30), 448.0)
    out = (round_e4m3(parts / scale) * scale).flatten(2).flatten(0, 1)
    return straight(w, out[:rows, :columns])


def round_mxfp4_weight(w: Tensor) -> Tensor:
    """E2M1 in blocks of 32 of the last dim, with power-of-two scales."""
    parts = w.unflatten(-1, (-1, 32))
    scale = _power(parts.abs().amax(-1, keepdim=True).clamp(min=1e-30), 6.0)
    x = parts / scale
    size = x.abs()
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return straight(w, (torch.round(size / unit) * unit * x.sign() * scale).flatten(-2))


@dataclasses.dataclass
class Output:
    """What a forward pass gives.

    Attributes:
        hidden: [B, T, D], normalised, in front of the lm head.
        drafts: the same of the draft layer for tokens two ahead [B, T - 1, D], or None.
        index_loss: mean KL divergence of the indexers.
        loads: share of the tokens that each expert got, by the name of its layer's bias.
    """

    hidden: Tensor
    drafts: Tensor | None
    index_loss: Tensor
    loads: dict[str, Tensor]


class Network:
    """The differentiable form.

    Attributes:
        n: its numbers.
        weights: trainable tensors by name.
        constants: the others.
        quantized: round weights and cache rows as they will be stored.
        sparse: attend to the indexer's top-k entries instead of all.
        dtype: of activations.
    """

    def __init__(
        self, n: Numbers, weights: dict[str, Tensor], constants: dict[str, Tensor]
    ) -> None:
        self.n = n
        self.weights = weights
        self.constants = constants
        self.quantized = False
        self.sparse = False
        self.dtype = torch.float32
        self._site_options = {"norm_eps": n.eps, "hc_eps": n.hc_eps, "iters": n.iterations}
        device = weights["embed.weight"].device
        plain = RopeTable(n.rope_dim, n.theta, None, device)
        compressed = RopeTable(n.rope_dim, n.compress_theta, YarnScaling(*n.yarn), device)
        for rope in (plain, compressed):
            rope.table_for(LONGEST)
        self._layers = {
            p: _layer(n, index, ratio, compressed if ratio else plain)
            for index, (p, ratio) in enumerate(n.blocks)
        }
        self._packed: dict[tuple[int, int], dict[int, train.Plan]] = {}

    def __call__(self, tokens: Tensor, positions: Tensor, *, drafts: bool = True) -> Output:
        """Run the backbone, and the draft layer if asked.

        Args:
            tokens: [B, T].
            positions: [B, T], ascending; a window does not reach across a gap of 128 or more.
            drafts: whether to run the draft layer.
        """
        n, size = self.n, tokens.shape
        self._index_losses: list[Tensor] = []
        self._loads: dict[str, Tensor] = {}
        self._plans, self._positions = self._plan(positions), positions.flatten()
        ids = tokens.flatten()
        embedded = self._w("embed.weight")[ids]
        h = embedded.unsqueeze(1).expand(-1, n.streams, -1)
        for p, ratio in n.blocks[: len(n.ratios)]:
            h = self._block(h, ids, p, ratio)
        hidden = self._head(h, "hc_head", "norm.weight")
        guess = None
        if drafts and n.drafts:
            following = embedded.view(*size, -1).roll(-1, 1).flatten(0, 1)
            guess = self._draft(h, following, ids).view(*size, -1)
        zero = hidden.new_zeros((), dtype=torch.float32)
        loss = sum(self._index_losses, zero)
        return Output(hidden.view(*size, -1), guess, loss, self._loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normalised rows."""
        return F.linear(hidden, self._w("head.weight"))

    def _plan(self, positions: Tensor) -> dict[int, train.Plan]:
        """Plans of a batch by ratio, their windows cut at gaps between positions."""
        n, (batch, length) = self.n, positions.shape
        plans = self._packed.get((batch, length))
        if plans is None:
            starts = list(range(0, batch * length + 1, length))
            plans = {
                ratio: train.Plan(starts, ratio, n.window, device=positions.device)
                for _, ratio in n.blocks
            }
            self._packed[batch, length] = plans
        token = torch.arange(length, device=positions.device)
        gap = positions.diff(prepend=positions[:, :1] - 1, dim=1) != 1
        run = torch.where(gap, token, 0).cummax(1).values
        count = (token - run + 1).clamp(max=n.window).flatten().int()
        end = torch.arange(1, len(count) + 1, dtype=torch.int32, device=count.device)
        for plan in plans.values():
            plan.ranges[:, 0] = end - count
            plan.ranges[:, 1] = count
        return plans

    def _draft(self, h: Tensor, following: Tensor, ids: Tensor) -> Tensor:
        """Position t sees the streams of t and the embedding of t + 1; the last means nothing."""
        p, eps, w = "mtp.0.", self.n.eps, self.weights
        e = self._fp8(p + "e_proj", train.rms_norm(following, w[p + "enorm.weight"], eps))
        g = self._fp8(p + "h_proj", train.rms_norm(h, w[p + "hnorm.weight"], eps))
        h = self._block(e.unsqueeze(1) + g, ids, p, 0)
        return self._head(h, p + "hc_head", p + "norm.weight")

    def _w(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _fp8(self, name: str, x: Tensor) -> Tensor:
        """A linear layer that is stored in FP8."""
        w = self.weights[name + ".weight"]
        return F.linear(x, (round_fp8_weight(w) if self.quantized else w).to(x.dtype))

    def _gates(self, prefix: str) -> tuple[Tensor, ...]:
        return tuple(self.weights[f"{prefix}_{name}"] for name in ("fn", "base", "scale"))

    def _head(self, h: Tensor, prefix: str, norm: str) -> Tensor:
        eps = self.n.eps
        y = train.hyper_head(h, *self._gates(prefix), norm_eps=eps, hc_eps=self.n.hc_eps)
        return train.rms_norm(y, self.weights[norm], eps)

    def _block(self, h: Tensor, ids: Tensor, p: str, ratio: int) -> Tensor:
        h = self._site(h, p, "attn", lambda y: self._attention(y, p, ratio))
        return self._site(h, p, "ffn", lambda y: self._experts(y, ids, p))

    def _site(self, h: Tensor, p: str, kind: str, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """A sub-layer between its hyper-connection's gates, behind its norm."""
        norm = self.weights[f"{p}{kind}_norm.weight"]
        gates = self._gates(f"{p}hc_{kind}")
        y, post, comb = train.hyper_pre(h, *gates, norm_weight=norm, **self._site_options)
        return train.hyper_post(inner(y), h, post, comb)

    def _attention(self, x: Tensor, p: str, ratio: int) -> Tensor:
        """The layer's attention, with its weights as they are used."""
        layer = self._layers[p]
        layer.format = CACHE_FORMATS["fp8" if self.quantized else "fp32"]
        layer.index_stage = "sparse" if self.sparse else "dense"
        weights = {name: self._used(f"{p}attn.{name}") for name, _ in layer.named_parameters()}
        out, loss, _ = torch.func.functional_call(
            layer, weights, (x, self._plans[ratio]), {"positions": self._positions}
        )
        if loss is not None:
            self._index_losses.append(loss)
        return out

    def _used(self, name: str) -> Tensor:
        """A weight of attention: matrices in the activations' dtype, rounded as they are stored."""
        w = self.weights[name]
        if w.ndim < 2 or name.endswith("ape"):
            return w
        rounds = self.quantized and _FP8.search(name) and not _POOLED.search(name)
        return (round_fp8_weight(w) if rounds else w).to(self.dtype)

    def _experts(self, x: Tensor, tokens: Tensor, p: str) -> Tensor:
        """All experts for all tokens, weighted; most weights are zero."""
        n, w = self.n, self.weights
        scores = F.softplus(F.linear(x.float(), w[p + "ffn.gate.weight"])).sqrt()
        table = self.constants.get(p + "ffn.gate.tid2eid")
        if table is not None:
            chosen = table[tokens]
        else:
            bias = self.constants[p + "ffn.gate.bias"]
            chosen = (scores.detach() + bias).topk(n.experts_per_token, -1).indices
        member = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if table is None:
            self._loads[p + "ffn.gate.bias"] = member.detach().mean(0)
        share = scores * member
        share = share / share.sum(-1, keepdim=True) * n.routed_scale

        def weight(name: str) -> Tensor:
            value = w[f"{p}ffn.experts.{name}.weight"]
            return (round_mxfp4_weight(value) if self.quantized else value).to(x.dtype)

        inner = swiglu(
            F.linear(x, weight("w1").flatten(0, 1)),
            F.linear(x, weight("w3").flatten(0, 1)),
            share,
            n.limit,
        )
        out = F.linear(inner, weight("w2").transpose(0, 1).flatten(1))
        s, one = p + "ffn.shared_experts.", torch.ones_like(share[..., :1])
        inner = swiglu(self._fp8(s + "w1", x), self._fp8(s + "w3", x), one, n.limit)
        return out + self._fp8(s + "w2", inner)


def _layer(n: Numbers, index: int, ratio: int, rope: RopeTable) -> train.Attention:
    """A layer's attention, without weights of its own."""
    chooses = ratio == 4
    spec = LayerSpec(
        index=index, role="backbone", ratio=ratio, overlap=chooses, selects=chooses,
        window=n.window, selection_width=n.topk if chooses else 0,
    )  # fmt: skip
    sizes = Sizes(
        n.hidden, n.heads, n.head_dim, n.q_lora, n.groups, n.o_lora, n.index_heads, n.index_dim,
        n.eps,
    )  # fmt: skip
    return train.Attention(spec, sizes, rope, CACHE_FORMATS["fp32"], device="meta")


def swiglu(gate: Tensor, up: Tensor, share: Tensor, limit: float) -> Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L) * share of its expert.

    Args:
        gate: [T, experts * width].
        up: the same.
        share: float32 [T, experts].
        limit: L.
    """
    inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    parts = inner.unflatten(-1, (share.shape[-1], -1))
    return (parts * share.to(inner.dtype).unsqueeze(-1)).flatten(-2)
