"""One attention layer over a whole sequence: dense blocks of scores with masks, no pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.config import OracleConfig
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.rounding import hadamard
from anymla.testing.oracle.row_formats import ROW_FORMATS
from anymla.testing.oracle.selection import best
from anymla.testing.oracle.weights import Weights

_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class RowRounding:
    """Layouts by which computed rows are rounded, unless recorded rows replace them.

    Attributes:
        main: layout id for window rows and entries; None keeps them exact.
        index: layout id for index keys; None keeps them exact.
        compressed: layout id for entries, if they have a layout of their own.
    """

    main: str | None = None
    index: str | None = None
    compressed: str | None = None


@dataclasses.dataclass
class LayerRows:
    """Exact rows that a layer caches: window [T, D], compressed [E, D], index [E, Di].

    Attributes:
        pooled_error: error of the compressed entries and the index keys, see ``pooled_error``.
    """

    window: Tensor
    compressed: Tensor | None = None
    index: Tensor | None = None
    pooled_error: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def rounded(self, rounding: RowRounding, *, rotates: bool = True) -> LayerRows:
        """Return the rows as read back from a cache; MXFP4 keys are rotated if the model's are."""

        def store(rows: Tensor | None, layout_id: str | None) -> Tensor | None:
            if rows is None or layout_id is None:
                return rows
            return ROW_FORMATS[layout_id].round(rows)

        window = store(self.window, rounding.main)
        assert window is not None
        index = self.index
        if index is not None and rotates and rounding.index == "v4_index_mxfp4":
            index = hadamard(index)
        entries = store(self.compressed, rounding.compressed or rounding.main)
        return LayerRows(window, entries, store(index, rounding.index))


@dataclasses.dataclass(frozen=True)
class IndexQueries:
    """Index queries q [T, H, Di] and head weights [T, H]."""

    q: Tensor
    weights: Tensor

    def scores(self, tokens: slice, keys: Tensor) -> Tensor:
        """Compute sum_h weight * relu(q_h . key) for a block of tokens: [n, E]."""
        dots = (self.q[tokens].flatten(0, 1) @ keys.T).clamp_(min=0)
        dots = dots.unflatten(0, (-1, self.q.shape[1]))
        return torch.einsum("nhe,nh->ne", dots, self.weights[tokens])

    def magnitudes(self, keys: Tensor) -> Tensor:
        """Return the size [T] of a score's error, for one relative unit of error in q and keys.

        Errors of channels and heads are independent: a product q_h . key of D channels is off by
        |q_h| |key| / sqrt(D), and the heads add as squares. The result is four standard deviations
        of that.
        """
        heads = (self.weights * self.q.norm(dim=-1)).square().sum(1).sqrt()
        largest = keys.norm(dim=-1).max() if len(keys) else 0.0
        return 4 * heads * largest / self.q.shape[-1] ** 0.5


class AttentionOracle:
    """Attention of layer ``index``, from the weights under ``prefix``."""

    def __init__(self, config: OracleConfig, weights: Weights, index: int, prefix: str) -> None:
        self.config = config
        self.weights = weights
        self.prefix = prefix
        # Draft layers follow the backbone and compress nothing.
        self.ratio = config.ratios[index] if index < config.layers else 0
        sharing = config.sharing
        self.compresses = self.ratio > 0 and (sharing is None or index in sharing.kv)
        # Mask bool [T, entries] of the entries within kept blocks, in layers that select in two
        # levels.
        self.kept: Tensor | None = None
        self.selects = f"{prefix}.indexer.wq_b.weight" in weights
        self.inv_freq = frequencies(config, compressed=self.ratio > 0)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, IndexQueries | None]:
        """Return main queries [T, H, D] and those of the indexer."""
        config, eps = self.config, self.config.norm_eps
        latent = rms_norm(self._project(x, "wq_a"), self._tensor("q_norm.weight"), eps)
        q = self._project(latent, "wq_b").unflatten(1, (config.heads, config.head_dim))
        if config.sharing is None:
            q = rms_norm(q, None, eps)
        q = rotate(q, positions, self.inv_freq)
        if not self.selects:
            return q, None
        index_q = self._project(latent, "indexer.wq_b")
        index_q = index_q.unflatten(1, (config.index_heads, config.index_dim))
        weights = self._project(x, "indexer.weights_proj")
        weights = weights * config.index_dim**-0.5 * config.index_heads**-0.5
        return q, IndexQueries(rotate(index_q, positions, self.inv_freq), weights)

    def rows(self, x: Tensor, positions: Tensor) -> LayerRows:
        """Return the rows that the layer writes to its caches for the whole sequence."""
        kv = rms_norm(self._project(x, "wkv"), self._tensor("kv_norm.weight"), self.config.norm_eps)
        rows = LayerRows(rotate(kv, positions, self.inv_freq))
        if self.compresses and self.config.sharing is not None:
            self._add_latent(rows, x)
        elif self.compresses:
            rows.compressed, rows.pooled_error["compressed"] = self._compress(x, "compressor")
        if self.selects and self.config.sharing is None:
            rows.index, rows.pooled_error["index"] = self._compress(x, "indexer.compressor")
        return rows

    def _add_latent(self, rows: LayerRows, x: Tensor) -> None:
        """Add entries [T // r, D] without bias or overlap, and keys, projected before rotation."""
        eps, norm = self.config.norm_eps, self._tensor("compressor.norm.weight")
        count = len(x) // self.ratio
        first = torch.arange(count) * self.ratio
        values = self._project(x, "compressor.wkv")
        pooled = values
        if self.ratio > 1:
            gate = self._project(x, "compressor.wgate")
            windows = [y[: count * self.ratio].unflatten(0, (count, -1)) for y in (values, gate)]
            pooled = (windows[0] * windows[1].softmax(1)).sum(1)
            nothing = torch.zeros(self.ratio, values.shape[1], dtype=values.dtype)
            rows.pooled_error["compressed"] = pooled_error(
                values, gate, nothing, norm, self.inv_freq, eps
            )
        latent = rms_norm(pooled, norm, eps)
        rows.compressed = rotate(latent, first, self.inv_freq)
        keys = rms_norm(
            self._project(latent, "indexer.wk"), self._tensor("indexer.k_norm.weight"), eps
        )
        rows.index = rotate(keys, first, self.inv_freq)

    def block_scores(self, index: IndexQueries, keys: Tensor, size: int) -> Tensor:
        """Return the best score of each block of entries: [T, blocks].

        The score of the newest visible entry's block is infinite, and -inf if no entry is visible.
        """
        scores = torch.full((len(index.q), -(-len(keys) // size)), -torch.inf, dtype=keys.dtype)
        for token in range(len(index.q)):
            seen = (token + 1) // self.ratio
            if not seen:
                continue
            row = index.scores(slice(token, token + 1), keys[:seen])[0]
            best = torch.stack([block.max() for block in row.split(size)])
            best[-1] = torch.inf
            scores[token, : len(best)] = best
        return scores

    def _compress(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return entries [T // r, D], by softmax over each window's rows, and their error."""
        kv, gate = self._project(x, f"{name}.wkv"), self._project(x, f"{name}.wgate")
        ape, norm = self._tensor(f"{name}.ape"), self._tensor(f"{name}.norm.weight")
        eps = self.config.norm_eps
        return (
            compress(kv, gate, ape, norm, self.inv_freq, eps),
            pooled_error(kv, gate, ape, norm, self.inv_freq, eps),
        )

    def visible(self, tokens: slice, entries: int) -> Tensor:
        """Return the mask of entries that each token of a block may see: bool [n, E]."""
        positions = torch.arange(tokens.start, tokens.stop).unsqueeze(1)
        seen = torch.arange(entries) < (positions + 1) // self.ratio
        return seen if self.kept is None else seen & self.kept[tokens, :entries]

    def select(self, index: IndexQueries, keys: Tensor, tokens: slice) -> Tensor:
        """Return the oracle's own selection for a block of tokens: [n, K], padded with -1."""
        keys = keys[: tokens.stop // self.ratio]
        scores = index.scores(tokens, keys)
        return best(scores, self.visible(tokens, len(keys)), self.config.index_topk)

    def attend(self, q: Tensor, rows: LayerRows, chosen: Tensor | None) -> Tensor:
        """Attend every token to its window and its entries, and to the sink: [T, H, D].

        Args:
            q: [T, H, D], queries of all heads.
            rows: cache rows as they are read.
            chosen: selected entries [T, K], -1 for none, or None for all visible ones.
        """
        window = self.config.window
        sink = self._tensor("attn_sink")
        out = torch.empty_like(q)
        entries = rows.compressed if rows.compressed is not None else rows.window[:0]
        for tokens in spans(len(q)):
            first = max(0, tokens.start - window + 1)
            distance = torch.arange(tokens.start, tokens.stop).unsqueeze(1)
            distance = distance - torch.arange(first, tokens.stop)
            mask = (distance >= 0) & (distance < window)
            keys = rows.window[first : tokens.stop]
            if len(entries):
                count = tokens.stop // self.ratio
                seen = self.visible(tokens, count)
                if chosen is not None:
                    seen = seen & membership(chosen[tokens], count)
                mask = torch.cat((mask, seen), 1)
                keys = torch.cat((keys, entries[:count]))
            scores = (q[tokens].flatten(0, 1) @ keys.T).unflatten(0, (-1, q.shape[1]))
            scores = scores * self.config.head_dim**-0.5
            scores = scores.masked_fill_(~mask.unsqueeze(1), -torch.inf)
            largest = scores.detach().amax(-1, keepdim=True)  # a constant to gradients
            weight = scores.sub_(largest).exp_()
            total = weight.sum(-1, keepdim=True) + (sink.view(-1, 1) - largest).exp()
            mixed = weight.flatten(0, 1) @ keys
            out[tokens] = mixed.unflatten(0, (-1, q.shape[1])) / total
        return out

    def output(self, out: Tensor, positions: Tensor) -> Tensor:
        """Apply inverse rotation, grouped and output projection: [T, H, D] -> [T, hidden]."""
        out = rotate(out, positions, self.inv_freq, inverse=True)
        grouped = out.flatten(1).unflatten(1, (self.config.groups, -1))
        wo_a = self.weights.linear(f"{self.prefix}.wo_a").unflatten(0, (self.config.groups, -1))
        return self._project(torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1), "wo_b")

    def _project(self, x: Tensor, name: str) -> Tensor:
        return self.weights.apply(x, f"{self.prefix}.{name}")

    def _tensor(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}.{name}"]


def compress(
    kv: Tensor, gate: Tensor, ape: Tensor, norm: Tensor, inv_freq: Tensor, eps: float
) -> Tensor:
    """Compute the compressed entries [T // r, D] of a sequence.

    Args:
        kv: values [T, W], W = D, or 2 D if entries overlap.
        gate: pooling logits of the tokens, [T, W].
        ape: bias [r, W] of the gate by position within the window.
        norm: weight of the RMSNorm, [D].
        inv_freq: frequencies of the rotation at each window's first position.
        eps: epsilon of the norm.
    """
    ratio = len(ape)
    weight = _windows(gate + _repeated(ape, gate), ratio, len(norm), -torch.inf).softmax(1)
    pooled = (weight * _windows(kv, ratio, len(norm), 0.0)).sum(1)
    return rotate(rms_norm(pooled, norm, eps), torch.arange(len(pooled)) * ratio, inv_freq)


def pooled_error(
    kv: Tensor, gate: Tensor, ape: Tensor, norm: Tensor, inv_freq: Tensor, eps: float
) -> Tensor:
    """Return the error [T // r, D] of ``compress`` for one unit of error in the rows that it pools.

    A number of kv or gate has an error of one unit of itself and of its row's root mean square,
    like any other that a layer computes. Errors of different rows are independent and add as
    squares, in

        c = sum_i p_i kv_i:   dc = sum_i p_i dkv_i + sum_i p_i (kv_i - c) dgate_i

    The norm then divides by the root mean square of c, which is smaller than that of its rows. The
    rotation mixes the channels of a pair.
    """
    ratio, dim = len(ape), len(norm)
    weight = _windows(gate + _repeated(ape, gate), ratio, dim, -torch.inf).softmax(1)
    rows = _windows(kv, ratio, dim, 0.0)
    off_rows, off_gates = (_windows(_unit(each), ratio, dim, 0.0) for each in (kv, gate))
    pooled = (weight * rows).sum(1)
    terms = off_rows.square() + ((rows - pooled.unsqueeze(1)) * off_gates).square()
    size = (pooled.square().mean(-1, keepdim=True) + eps).sqrt()
    error = (weight.square() * terms).sum(1).sqrt() * norm.abs() / size
    start = dim - 2 * len(inv_freq)
    pairs = error[:, start:].unflatten(1, (-1, 2)).norm(dim=-1).repeat_interleave(2, 1)
    return torch.cat((error[:, :start], pairs), 1)


def _unit(x: Tensor) -> Tensor:
    """Return the absolute error of numbers [..., W] whose relative error is 1."""
    return x.abs() + x.square().mean(-1, keepdim=True).sqrt()


def _repeated(ape: Tensor, gate: Tensor) -> Tensor:
    return ape.repeat(-(-len(gate) // len(ape)), 1)[: len(gate)]


def _windows(x: Tensor, ratio: int, dim: int, absent: float) -> Tensor:
    """Return the rows of x [T, W] that each entry pools: [T // r, r or 2 r, D]."""
    count = len(x) // ratio
    x = x[: count * ratio].unflatten(0, (count, ratio))
    if x.shape[-1] == dim:
        return x
    # The first half of the channels belongs to the next window's entry.
    return torch.cat((_shifted(x[..., :dim], absent), x[..., dim:]), 1)


def spans(n: int) -> Iterator[slice]:
    """Yield blocks of tokens 0 .. n-1."""
    for start in range(0, n, _BLOCK):
        yield slice(start, min(start + _BLOCK, n))


def membership(chosen: Tensor, count: int) -> Tensor:
    """Return bool [n, count], the mask of 0 .. count-1 in each row of ``chosen`` [n, K]."""
    member = torch.zeros(len(chosen), count + 1, dtype=torch.bool)
    inside = (chosen >= 0) & (chosen < count)
    return member.scatter_(1, torch.where(inside, chosen, count), True)[:, :count]


def _shifted(x: Tensor, fill: float) -> Tensor:
    """Shift each window's rows to the next window; the first window gets ``fill``."""
    return torch.cat((torch.full_like(x[:1], fill), x[:-1]))
