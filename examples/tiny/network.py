"""DeepSeek-V4 in a differentiable form: whole sequences in batches, no pages, gradients everywhere.

Written for training: the same mathematics as ``anymla``'s model, from the same ``ModelConfig`` and
under the same tensor names, but with attention over blocks of the sequence and every expert run for
every token. What rounds in use (FP8 and MXFP4 weights, FP8 cache rows) can be rounded here as well,
with gradients passed straight through.

The indexer learns apart from the rest: its inputs are detached, and its loss is the KL divergence
from the attention that the heads together pay to the compressed entries (as in DeepSeek's report on
V3.2). The heads attend to all entries while it is young, then to its top-k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernels import attention_weights, collapse, expand, rope, swiglu
from torch import Tensor

WINDOW_BLOCK = 128


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


def frequencies(n: Numbers, compressed: bool) -> Tensor:
    """Radians per position of each pair."""
    theta = n.compress_theta if compressed else n.theta
    inverse = theta ** -(torch.arange(0, n.rope_dim, 2, dtype=torch.float32) / n.rope_dim)
    if not compressed:
        return inverse
    factor, original, fast, slow = n.yarn

    def pair(rotations: float) -> float:
        return n.rope_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), n.rope_dim - 1)
    blend = ((torch.arange(n.rope_dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse * (1 - blend) + inverse / factor * blend


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """X / rms(x) * weight."""
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


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


def round_rows(x: Tensor, block: int) -> Tensor:
    """FP8 in blocks of channels with power-of-two scales, as cache rows and activations are."""
    parts = x.float().unflatten(-1, (-1, block))
    scale = _power(parts.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    return straight(x, (round_e4m3(parts / scale) * scale).flatten(-2).to(x.dtype))


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
        query_block: queries whose index scores of single heads exist at a time; None for all.
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
        self.query_block: int | None = None
        device = weights["embed.weight"].device
        self._freq = {flag: frequencies(n, flag).to(device) for flag in (False, True)}

    def __call__(self, tokens: Tensor, positions: Tensor, *, drafts: bool = True) -> Output:
        """Run the backbone, and the draft layer if asked.

        Args:
            tokens: [B, T], T a multiple of 128.
            positions: [B, T]; multiples of 128 tokens begin at multiples of 128.
            drafts: whether to run the draft layer.
        """
        n = self.n
        self._index_losses: list[Tensor] = []
        self._loads: dict[str, Tensor] = {}
        embedded = self._w("embed.weight")[tokens]
        h = embedded.unsqueeze(2).expand(-1, -1, n.streams, -1)
        for p, ratio in n.blocks[: len(n.ratios)]:
            h = self._block(h, tokens, positions, p, ratio)
        hidden = rms_norm(self._collapse(h, "hc_head"), self.weights["norm.weight"], n.eps)
        guess = None
        if drafts and n.drafts:
            guess = self._draft(h, embedded, tokens, positions)
        zero = hidden.new_zeros((), dtype=torch.float32)
        return Output(hidden, guess, sum(self._index_losses, zero), self._loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normalised rows."""
        return F.linear(hidden, self._w("head.weight"))

    def _draft(self, h: Tensor, embedded: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Position t sees the streams of t and the embedding of t + 1; the last means nothing."""
        p, eps = "mtp.0.", self.n.eps
        following = torch.cat((embedded[:, 1:], embedded[:, :1]), 1)
        e = self._fp8(p + "e_proj", rms_norm(following, self.weights[p + "enorm.weight"], eps))
        g = self._fp8(p + "h_proj", rms_norm(h, self.weights[p + "hnorm.weight"], eps))
        h = self._block(e.unsqueeze(2) + g, tokens, positions, p, 0)
        return rms_norm(self._collapse(h, p + "hc_head"), self.weights[p + "norm.weight"], eps)

    def _w(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _fp8(self, name: str, x: Tensor) -> Tensor:
        """A linear layer that is stored in FP8."""
        w = self.weights[name + ".weight"]
        return F.linear(x, (round_fp8_weight(w) if self.quantized else w).to(x.dtype))

    def _mix(self, h: Tensor, prefix: str) -> Tensor:
        flat = rms_norm(h.flatten(-2).float(), None, self.n.eps)
        return F.linear(flat, self.weights[prefix + "_fn"])

    def _collapse(self, h: Tensor, prefix: str) -> Tensor:
        mix = self._mix(h, prefix) * self.weights[prefix + "_scale"]
        return collapse(h, torch.sigmoid(mix + self.weights[prefix + "_base"]) + self.n.hc_eps)

    def _site(self, h: Tensor, prefix: str, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """A sub-layer between its hyper-connection's gates."""
        n, s = self.n.streams, self.weights[prefix + "_scale"]
        mix, base = self._mix(h, prefix), self.weights[prefix + "_base"]
        pre, post, comb = gates(mix, base, s, n, self.n.iterations, self.n.hc_eps)
        return expand(h, inner(collapse(h, pre)), post, comb)

    def _block(self, h: Tensor, tokens: Tensor, positions: Tensor, p: str, ratio: int) -> Tensor:
        eps, w = self.n.eps, self.weights

        def attention(y: Tensor) -> Tensor:
            return self._attention(rms_norm(y, w[p + "attn_norm.weight"], eps), positions, p, ratio)

        def experts(y: Tensor) -> Tensor:
            return self._experts(rms_norm(y, w[p + "ffn_norm.weight"], eps), tokens, p)

        h = self._site(h, p + "hc_attn", attention)
        return self._site(h, p + "hc_ffn", experts)

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
            self._loads[p + "ffn.gate.bias"] = member.detach().mean((0, 1))
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

    def _rows(self, rows: Tensor) -> Tensor:
        """Cache rows as they read back: FP8 without the rotated channels."""
        if not self.quantized:
            return rows
        plain = self.n.head_dim - self.n.rope_dim
        return torch.cat((round_rows(rows[..., :plain], 64), rows[..., plain:]), -1)

    def _pool(self, x: Tensor, name: str, ratio: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Compressed entries [B, T // ratio, dim], rotated at their first token's position."""
        w = self.weights
        dim = len(w[name + "norm.weight"])
        kv, gate = (
            F.linear(x, self._w(name + "wkv.weight")),
            F.linear(x, self._w(name + "wgate.weight")),
        )
        kv, gate = (part.float().unflatten(1, (-1, ratio)) for part in (kv, gate))
        gate = gate + w[name + "ape"]
        if ratio == 4:  # the first half of the channels goes to the next window's entry
            kv, gate = (_overlap(part, dim, fill) for part, fill in ((kv, 0.0), (gate, -1e30)))
        pooled = (gate.softmax(2) * kv).sum(2)
        normed = rms_norm(pooled, w[name + "norm.weight"], self.n.eps).to(x.dtype)
        return rope(normed, cos[:, ::ratio], sin[:, ::ratio])

    def _attention(self, x: Tensor, positions: Tensor, p: str, ratio: int) -> Tensor:
        n, w, eps = self.n, self.weights, self.n.eps
        a = p + "attn."
        angle = positions.unsqueeze(-1).float() * self._freq[ratio > 0]
        cos, sin = angle.cos(), angle.sin()
        latent = rms_norm(self._fp8(a + "wq_a", x), w[a + "q_norm.weight"], eps)
        q = self._fp8(a + "wq_b", latent).unflatten(-1, (n.heads, -1))
        q = rope(rms_norm(q, None, eps), cos, sin)
        kv = rms_norm(self._fp8(a + "wkv", x), w[a + "kv_norm.weight"], eps)
        kv = self._rows(rope(kv, cos, sin))
        entries = keys = queries = None
        if ratio:
            entries = self._rows(self._pool(x, a + "compressor.", ratio, cos, sin))
        if ratio == 4:
            c, still = a + "indexer.", x.detach()
            keys = self._pool(still, c + "compressor.", ratio, cos, sin)
            iq = self._fp8(c + "wq_b", latent.detach()).unflatten(-1, (n.index_heads, -1))
            head = F.linear(still, self._w(c + "weights_proj.weight")).float()
            queries = (rope(iq, cos, sin), head * (n.index_dim * n.index_heads) ** -0.5)
        out = self._attend(q, kv, entries, queries, keys, positions, w[a + "attn_sink"], ratio)
        out = rope(out, cos, sin, inverse=True)
        groups = out.flatten(2).unflatten(-1, (n.groups, -1))
        wo_a = w[a + "wo_a.weight"]
        wo_a = (round_fp8_weight(wo_a) if self.quantized else wo_a).to(x.dtype)
        z = torch.einsum("btgc,grc->btgr", groups, wo_a.unflatten(0, (n.groups, -1)))
        return self._fp8(a + "wo_b", z.flatten(2))

    def _attend(self, q, kv, entries, queries, keys, positions, sink, ratio: int) -> Tensor:
        """Window, compressed entries and sink: [B, T, H, head_dim]."""
        n, size, length = self.n, WINDOW_BLOCK, q.shape[1]
        rows = _with_previous(kv, size)
        window = torch.einsum("bcqhd,bckd->bcqhk", q.unflatten(1, (-1, size)), rows).flatten(1, 2)
        scored = keep = index = None
        if entries is not None:
            scored = torch.einsum("bqhd,bed->bqhe", q, entries)
            if queries is not None:
                index = self._index_scores(queries, keys, ratio)
                if self.sparse and index.shape[-1] > n.topk:
                    chosen = index.detach().topk(n.topk, -1).indices
                    keep = torch.zeros_like(index, dtype=torch.bool).scatter_(-1, chosen, True)
        near, far = attention_weights(
            window, scored, sink, positions, keep=keep, ratio=ratio,
            size=size, reach=n.window, scale=n.head_dim**-0.5,
        )  # fmt: skip
        out = torch.einsum("bcqhk,bckd->bcqhd", near.unflatten(1, (-1, size)), rows).flatten(1, 2)
        if far is None:
            return out
        if index is not None and torch.is_grad_enabled():
            seen = _visible(length, index.shape[-1], ratio, q.device)
            attention = far.detach().float().mean(2)
            self._index_losses.append(
                _divergence(attention, index, seen if keep is None else seen & keep)
            )
        return out + torch.einsum("bqhe,bed->bqhd", far, entries)

    def _index_scores(self, queries, keys: Tensor, ratio: int) -> Tensor:
        """The indexer's scores of all entries, float32 [B, T, E]; -1e30 where there is none yet."""
        iq, head = queries
        step = self.query_block or iq.shape[1]
        parts = []
        for start in range(0, iq.shape[1], step):
            block = slice(start, start + step)
            dots = torch.einsum("bqhd,bed->bqhe", iq[:, block], keys).relu()
            parts.append(torch.einsum("bqhe,bqh->bqe", dots, head[:, block].to(dots.dtype)).float())
        scores = torch.cat(parts, 1)
        return scores.masked_fill(~_visible(*scores.shape[1:], ratio, scores.device), -1e30)


def _visible(length: int, count: int, ratio: int, device: torch.device) -> Tensor:
    """Bool [1, T, E]: entry e is there from token ratio * (e + 1) - 1 on."""
    closed = (torch.arange(length, device=device) + 1) // ratio
    return (torch.arange(count, device=device) < closed.unsqueeze(1)).unsqueeze(0)


def gates(mix: Tensor, base: Tensor, scale: Tensor, n: int, iterations: int, eps: float):
    """The pre [.., N], post [.., N] and comb [.., N, N] gates of a hyper-connection."""
    pre = torch.sigmoid(mix[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mix[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mix[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    start = comb.softmax(-1) + eps
    with torch.no_grad():
        settled = sinkhorn(start.detach(), iterations, eps)
        factor = settled / start.detach()
    # The iteration's limit does not depend on how rows and columns are scaled before it, so its
    # gradient is that of a few iterations from where it has settled.
    return pre, post, sinkhorn(start * factor, 3, eps) if torch.is_grad_enabled() else settled


def sinkhorn(x: Tensor, iterations: int, eps: float) -> Tensor:
    """Divide by sums over the first and the last axis in turn; columns first and last."""
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


def _divergence(attention: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """KL(attention over entries || softmax of index scores), by how much attention there is.

    Args:
        attention: [B, n, E], mean over heads.
        scores: [B, n, E].
        mask: bool [B or 1, n, E], entries that could be attended to.
    """
    mass = attention.sum(-1)
    target = attention / mass.clamp(min=1e-6).unsqueeze(-1)
    log_q = scores.masked_fill(~mask, -1e30).log_softmax(-1)
    kl = (target * (target.clamp(min=1e-9).log() - log_q)).masked_fill(~mask, 0).sum(-1)
    weight = mass + 0.02
    seen = mask.any(-1).to(kl.dtype).expand_as(kl)
    return (kl * weight * seen).sum() / (weight * seen).sum().clamp(min=1.0)


def _with_previous(x: Tensor, size: int) -> Tensor:
    """[B, T, D] -> [B, T / size, 2 size, D]: each block behind the one before it, or itself."""
    blocks = x.unflatten(1, (-1, size))
    return torch.cat((torch.cat((blocks[:, :1], blocks[:, :-1]), 1), blocks), 2)


def _overlap(x: Tensor, dim: int, fill: float) -> Tensor:
    """[B, E, 4, 2 dim] -> [B, E, 8, dim]: the window before gives its first half of channels."""
    first, second = x[..., :dim], x[..., dim:]
    shifted = torch.cat((torch.full_like(first[:, :1], fill), first[:, :-1]), 1)
    return torch.cat((shifted, second), 2)
