"""The indexer in training: the entries that it selects, and the loss by which it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, get_layout
from anymla.layers.selection import TwoLevels
from anymla.layers.selection import select_entries as layers_select
from anymla.ops.indexer import indexer_q_rope_quant, select_topk
from anymla.ops.indexer.interface import SCRATCH_BYTES
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, wide_dtype
from anymla.train.operator import Gradients, differentiable
from anymla.train.plan import Plan

# Rows of a page of index keys; kernels are compiled for it.
_PAGE = 64
# Fewest tokens of a block, if there is room: what a launch costs is shared.
_LEAST_BLOCK = 1024
# Elements of the products of a block of tokens, for all heads.
_CPU_BLOCK = 1 << 22
_DEVICE_BLOCK = 1 << 27


@torch.no_grad()
def select_entries(
    iq: Tensor,
    ik: Tensor,
    weights: Tensor,
    plan: Plan,
    rope: Tensor,
    *,
    width: int,
    layout: str,
    positions: Tensor | None = None,
    quantize: bool = True,
    hadamard: bool = False,
    levels: TwoLevels | None = None,
) -> Tensor:
    """Select the best entries of every token by the operations that select when serving.

    Args:
        iq: index queries before rotation, [T, Hi, Di] floating point.
        ik: rotated index keys from ``compress``, [E, Di] float32.
        weights: weights of the index heads without factors, [T, Hi] floating point.
        plan: plan of the sequences, of the keys' ratio.
        rope: rotary table of cosines and sines, [L, R] float32.
        width: number of entries to keep for a token.
        layout: identifier of the index cache's layout.
        positions: positions that queries are rotated by, [T] int64; None for the plan's.
        quantize: True to quantise queries as the keys are.
        hadamard: True to transform MXFP4 queries and keys first.
        levels: blocks of entries that are kept for later layers, or selected within; None for
            neither.

    Returns:
        Entries of each token's sequence, ascending, then -1: [T, width] int32, as ``attention``
        takes them.
    """
    quant = {INDEX_FP8: "fp8", INDEX_MXFP4: "mxfp4"}.get(layout, "none") if quantize else "none"
    hadamard = hadamard and layout == INDEX_MXFP4
    queries, scales, shares = indexer_q_rope_quant(
        iq, weights, plan.positions.long() if positions is None else positions, rope,
        softmax_scale=iq.shape[2] ** -0.5, head_scale=iq.shape[1] ** -0.5, quant=quant,
        hadamard=hadamard,
    )  # fmt: skip
    # Every sequence has pages of its own.
    counts = plan.cu_entries.long().diff()
    pages = (counts + _PAGE - 1) // _PAGE
    first = pages.cumsum(0) - pages
    most = -(-plan.num_entries // _PAGE) + len(counts)
    cache = get_layout(layout).allocate(max(most, 1), _PAGE, ik.device)
    entry = torch.arange(plan.num_entries, device=ik.device)
    owner = torch.searchsorted(plan.cu_entries[1:].long(), entry, right=True)
    known = owner.clamp(max=max(len(counts) - 1, 0))
    slot = (first * _PAGE - plan.cu_entries[:-1]).index_select(0, known) + entry
    slot = torch.where(owner < len(counts), slot, -1)
    keys = hadamard_transform(ik) if hadamard else ik
    quantize_and_insert_k_cache(keys, cache, slot, layout=layout)
    column = torch.arange(max(1, -(-plan.most_entries // _PAGE)), device=ik.device)
    table = torch.where(column < pages.unsqueeze(1), first.unsqueeze(1) + column, -1).int()
    visible = plan.ranges[:, 3].contiguous()
    if levels is not None:
        lengths = plan.lengths
        if lengths is None:  # each token for itself
            table = table.index_select(0, plan.sequence.clamp(max=len(table) - 1))
            lengths = (1,) * plan.tokens
        selected = torch.full((plan.tokens, width), -1, dtype=torch.int32, device=ik.device)
        return layers_select(
            queries, scales if scales.numel() else None, shares, visible, cache, table,
            query_lens=lengths, num_decodes=0, max_context=plan.most_entries, layout=layout,
            out=selected, levels=levels,
        )  # fmt: skip
    return select_topk(
        queries, cache, shares, visible, table, width,
        max_context=plan.most_entries, token_to_req=plan.sequence, layout=layout,
        q_scales=scales if scales.numel() else None,
        scratch_bytes=max(SCRATCH_BYTES, 8 * plan.most_entries),
    )  # fmt: skip


def index_loss(
    iq: Tensor,
    ik: Tensor,
    weights: Tensor,
    plan: Plan,
    q: Tensor,
    entries: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    *,
    lists: Tensor | None = None,
    scale: float | None = None,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Divergence of the indexer's distribution from the attention that heads pay to entries.

    Over the set S_t of entries that token t may see, or of those in its list,

        m_te = sum_h exp(scale <q_th, entry_e> - logaddexp(lse_th, sink_h))       P = m / sum_S m
        I_te = sum_h weights_th relu(<iq_th, ik_e>)                               Q = softmax_S(I)
        loss = sum_t w_t sum_S P log(P / Q)

    so that the teacher's denominator has window and sink, and heads are summed before P is
    normalised. Only iq, ik and weights receive gradients, dI = w (Q - P); nothing flows through
    the selection or to the teacher. Tokens without entries add nothing. The gradient is computed
    beside the loss, a block of tokens at a time: no [T, E] ever lives.

    Args:
        iq: index queries, [T, Hi, Di] floating point.
        ik: index keys of the entries, [E, Di] of iq's dtype.
        weights: weights of the index heads with all their factors, [T, Hi] floating point.
        plan: plan of the sequences, of the entries' ratio.
        q: query heads of attention, [T, H, D] floating point.
        entries: entries that were attended to, [E, D] floating point.
        lse: [T, H] float32 (or float64) from attention, without the sink.
        sink: sinks of the heads, [H] float32 (or float64); None for none.
        lists: selected entries, [T, K] int32 counted in the entries of the token's sequence;
            as for ``attention``, negative ones are skipped, and so are columns from the number of
            visible entries on. None for all visible entries (warm-up).
        scale: factor of the scores; None for D ** -0.5.
        token_weights: w, [T] float32; None for 1 / T.

    Returns:
        The loss, a scalar in float32 (float64 if iq is).

    Raises:
        TypeError, ValueError: a dtype, shape or device differs from the above.
    """
    sink = None if sink is None else sink.detach()
    loss: Tensor = _loss(
        iq, ik, weights, plan.ranges, q.detach(), entries.detach(), lse.detach(), sink, lists,
        token_weights, q.shape[2] ** -0.5 if scale is None else scale, plan.ratio,
        plan.num_entries, plan.most_entries,
    )[0]  # fmt: skip
    return loss


@dataclasses.dataclass(frozen=True)
class _Teacher:
    """Arguments of ``index_loss`` that have no gradient; its plan's are ranges and three sizes."""

    ranges: Tensor
    q: Tensor
    entries: Tensor
    lse: Tensor
    sink: Tensor | None
    lists: Tensor | None
    token_weights: Tensor | None
    scale: float
    ratio: int
    num_entries: int
    most_entries: int

    def span(self, tokens: int) -> int:
        """Return the number of columns of a block of tokens.

        Without lists these are neighbours: those of the first token's sequence, and those that the
        block's own tokens complete.
        """
        if self.lists is not None:
            return self.lists.shape[1]
        return min(self.num_entries, self.most_entries + tokens // self.ratio)

    def block(self, elements: int) -> int:
        """Return the number of tokens whose products, of at most ``elements``, live at a time."""
        tokens = max(_LEAST_BLOCK, self.ratio * self.most_entries)
        while tokens > 1 and tokens * self.span(tokens) > elements:
            tokens //= 2
        return tokens

    def members(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return entries of a block of tokens and a mask [t, n] of those in a token's set.

        The entries are [t, n] of lists, or [n] for all tokens of the block.
        """
        ranges, count = self.ranges[part].long(), len(self.entries)
        first, seen = ranges[:, 2:3] - len(self.ranges), ranges[:, 3:4]
        if self.lists is None:
            entry = first[0] + torch.arange(self.span(part.stop - part.start), device=first.device)
            inside = (entry >= first) & (entry < first + seen)
            return entry.clamp(max=count - 1), inside & (entry < count)
        local = self.lists[part].long()
        entry = first + local
        inside = (torch.arange(local.shape[1], device=local.device) < seen) & (local >= 0)
        inside &= (entry >= 0) & (entry < count)
        return torch.where(inside, entry, 0), inside

    def mass(self, part: slice, entry: Tensor, inside: Tensor, wide: torch.dtype) -> Tensor:
        """Return the heads' attention to the entries of some tokens, [t, n]; 0 outside the set."""
        total = self.lse[part].to(wide)
        if self.sink is not None:
            total = torch.logaddexp(total, self.sink.to(wide).expand_as(total))
        # A head whose denominator is empty or infinite attends to nothing.
        there = total.isfinite().unsqueeze(2)
        scores = _dots(self.q[part], self.entries, entry, wide) * self.scale
        p = torch.where(there & inside.unsqueeze(1), scores - total.unsqueeze(2), -torch.inf).exp()
        return p.sum(1)


def _dots(q: Tensor, rows: Tensor, entry: Tensor, wide: torch.dtype) -> Tensor:
    """Return <q_th, rows of entry> as [t, H, n] in ``wide``."""
    if entry.ndim == 1:
        return torch.einsum("thd,ed->the", q.to(wide), rows[entry].to(wide))
    return torch.bmm(q.to(wide), rows[entry].to(wide).transpose(1, 2))


def _index_loss(
    iq: Tensor,
    ik: Tensor,
    weights: Tensor,
    ranges: Tensor,
    q: Tensor,
    entries: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    lists: Tensor | None,
    token_weights: Tensor | None,
    scale: float,
    ratio: int,
    num_entries: int,
    most_entries: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and its gradients of iq, ik and weights."""
    sizes = {"T": len(ranges), "E": num_entries}
    check(
        "index_loss",
        dims=sizes,
        iq=(iq, "T Hi Di", FLOATS),
        ik=(ik, "E Di", iq.dtype),
        weights=(weights, "T Hi", FLOATS),
        q=(q, "T H D", FLOATS),
        entries=(entries, "E D", q.dtype),
        lse=(lse, "T H", FLOAT32_UP),
        sink=(sink, "H", FLOAT32_UP),
        lists=(lists, "T _", INT32),
        token_weights=(token_weights, "T", FLOAT32_UP),
    )
    teacher = _Teacher(
        ranges, q, entries, lse, sink, lists, token_weights, scale, ratio, num_entries, most_entries
    )
    wide = wide_dtype(iq.dtype)
    tokens, count = len(iq), len(ik)
    loss = torch.zeros((), dtype=wide, device=iq.device)
    diq, dweights = (torch.zeros_like(x) for x in (iq, weights))
    dik = torch.zeros_like(ik, dtype=wide)
    limit = _CPU_BLOCK if iq.device.type == "cpu" else _DEVICE_BLOCK
    heads = max(iq.shape[1], teacher.q.shape[1])
    if teacher.lists is not None:
        heads += teacher.q.shape[2]  # gathered entries
    step = teacher.block(limit // max(1, heads))
    for start in range(0, tokens if count and teacher.span(1) else 0, step):
        part = slice(start, start + step)
        entry, inside = teacher.members(part)
        mass = teacher.mass(part, entry, inside, wide)
        total = mass.sum(1, keepdim=True)
        # Attention may have underflown for all entries of a token; it then teaches nothing.
        target = mass / torch.where(total > 0, total, 1)
        dots = _dots(iq[part], ik, entry, wide).relu_()
        share = weights[part].to(wide)
        scores = torch.bmm(share.unsqueeze(1), dots).squeeze(1)
        log_q = torch.where(inside, scores, -1e30).log_softmax(1)
        weight = (total.squeeze(1) > 0).to(wide)
        given = teacher.token_weights
        weight = weight / tokens if given is None else weight * given[part].to(wide)
        each = torch.xlogy(target, target) - target * log_q
        loss += (torch.where(inside, each, 0).sum(1) * weight).sum()
        dscores = torch.where(inside, log_q.exp() - target, 0) * weight.unsqueeze(1)
        dweights[part] = torch.bmm(dots, dscores.unsqueeze(2)).squeeze(2)
        ddots = dscores.unsqueeze(1) * share.unsqueeze(2) * (dots > 0)
        queries = iq[part].to(wide)
        if entry.ndim == 1:
            diq[part] = torch.einsum("the,ed->thd", ddots, ik[entry].to(wide))
            dik.index_add_(0, entry, torch.einsum("the,thd->ed", ddots, queries))
        else:
            diq[part] = torch.bmm(ddots, ik[entry].to(wide))
            pulled = torch.bmm(ddots.transpose(1, 2), queries)
            dik.index_add_(0, entry.flatten(), pulled.flatten(0, 1))
    return loss, diq, dik.to(ik.dtype), dweights


def _index_loss_backward(
    grads: list[Tensor], needs: list[bool], kept: list[Tensor], *_: Any
) -> Gradients:
    return [each * grads[0].to(each.dtype) for each in kept]


def _index_loss_fake(iq: Tensor, ik: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, ...]:
    gradients = (each.new_empty(each.shape) for each in (iq, ik, weights))
    return iq.new_empty((), dtype=wide_dtype(iq.dtype)), *gradients


_loss = differentiable(_index_loss, _index_loss_backward, _index_loss_fake, learns=3)
