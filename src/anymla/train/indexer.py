"""The loss by which an indexer learns from the attention that it selects for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, wide_dtype
from anymla.train.plan import Plan

# Elements of the products of a block of tokens, for all heads.
_CPU_BLOCK = 1 << 22
_DEVICE_BLOCK = 1 << 27


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
    sizes = {"T": plan.tokens, "E": plan.num_entries}
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
        plan, q.detach(), entries.detach(), lse.detach(),
        None if sink is None else sink.detach(), lists,
        q.shape[2] ** -0.5 if scale is None else scale, token_weights,
    )  # fmt: skip
    loss: Tensor = _IndexLoss.apply(iq, ik, weights, teacher)  # type: ignore[no-untyped-call]
    return loss


@dataclasses.dataclass(frozen=True)
class _Teacher:
    """Arguments of ``index_loss`` that have no gradient."""

    plan: Plan
    q: Tensor
    entries: Tensor
    lse: Tensor
    sink: Tensor | None
    lists: Tensor | None
    scale: float
    token_weights: Tensor | None

    def members(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return entries of some tokens and a mask of those in their set, each [t, n].

        Without lists the entries are all E for every token, [E].
        """
        ranges = self.plan.ranges[part].long()
        first, seen = ranges[:, 2:3] - self.plan.tokens, ranges[:, 3:4]
        count = len(self.entries)
        if self.lists is None:
            entry = torch.arange(count, device=first.device)
            return entry, (entry >= first) & (entry < first + seen)
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
        return torch.einsum("thd,ed->the", q.to(wide), rows.to(wide))
    return torch.bmm(q.to(wide), rows[entry].to(wide).transpose(1, 2))


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, iq: Tensor, ik: Tensor, weights: Tensor, teacher: _Teacher) -> Tensor:
        wide = wide_dtype(iq.dtype)
        tokens, count = len(iq), len(ik)
        loss = torch.zeros((), dtype=wide, device=iq.device)
        diq, dweights = (torch.zeros_like(x) for x in (iq, weights))
        dik = torch.zeros_like(ik, dtype=wide)
        width = count if teacher.lists is None else teacher.lists.shape[1]
        limit = _CPU_BLOCK if iq.device.type == "cpu" else _DEVICE_BLOCK
        heads = max(iq.shape[1], teacher.q.shape[1])
        if teacher.lists is not None:
            heads += teacher.q.shape[2]
        step = max(1, limit // max(1, width * heads))
        for start in range(0, tokens if width and count else 0, step):
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
                diq[part] = torch.einsum("the,ed->thd", ddots, ik.to(wide))
                dik += torch.einsum("the,thd->ed", ddots, queries)
            else:
                diq[part] = torch.bmm(ddots, ik[entry].to(wide))
                pulled = torch.bmm(ddots.transpose(1, 2), queries)
                dik.index_add_(0, entry.flatten(), pulled.flatten(0, 1))
        ctx.save_for_backward(diq, dik.to(ik.dtype), dweights)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *(x * dloss.to(x.dtype) for x in ctx.saved_tensors), None
