"""The indexer's loss against autograd of its formula, in float64."""

import pytest
import torch

from anymla.train import indexer as module
from anymla.train.indexer import index_loss
from anymla.train.plan import Plan

LENGTHS = [3, 17, 0, 40, 9]
HEADS, INDEX_HEADS = 3, 2


@pytest.fixture(autouse=True)
def gradients(inference_rules):
    with torch.enable_grad():
        yield


def draw(plan, spread=1.0):
    g = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * spread

    student = [rand(plan.tokens, INDEX_HEADS, 6), rand(plan.num_entries, 6),
               rand(plan.tokens, INDEX_HEADS)]  # fmt: skip
    q, rows, entries = rand(plan.tokens, HEADS, 8), rand(plan.tokens, 8), rand(plan.num_entries, 8)
    return [x.requires_grad_() for x in student], q, rows, entries, rand(HEADS)


def plain(student, plan, q, rows, entries, sink, lists, token_weights=None):
    """Scores, one softmax over window, set and sink, and a divergence, token by token."""
    iq, ik, weights = student
    losses, lses = [], []
    for t, (a, n, b, m) in enumerate(plan.ranges.tolist()):
        b -= plan.tokens
        members = range(b, b + m)
        if lists is not None:
            members = [b + e for e in lists[t, :m].tolist() if e >= 0]
        members = torch.tensor(list(members), dtype=torch.int64)
        window = rows[a : a + n]
        seen = torch.cat((window, entries[members]))
        scores = torch.einsum("hd,nd->hn", q[t], seen) * 8**-0.5
        lses.append(scores.logsumexp(1))
        p = torch.cat((scores, sink.unsqueeze(1)), 1).softmax(1)
        mass = p[:, len(window) : len(seen)].sum(0)
        if not len(members):
            continue
        target = (mass / mass.sum()).detach()
        index = torch.einsum("hd,ed->he", iq[t], ik[members]).relu()
        log_q = (weights[t].unsqueeze(1) * index).sum(0).log_softmax(0)
        w = 1 / plan.tokens if token_weights is None else token_weights[t]
        losses.append(w * (target * (target.log() - log_q)).sum())
    return torch.stack(losses).sum(), torch.stack(lses)


def some_lists(plan, count=4):
    """Distinct visible entries in any order, with gaps."""
    g = torch.Generator().manual_seed(3)
    key = torch.rand(plan.tokens, 12, generator=g)
    key += torch.arange(12) >= plan.ranges[:, 3:]  # those that are not visible come last
    order = key.argsort(1)[:, :count].int()
    return torch.where(torch.rand(order.shape, generator=g) < 0.2, -1, order)


@pytest.mark.parametrize("block", [1 << 22, 400, 1])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("selected", [False, True])
def test_gradients_of_packed_sequences(selected, weighed, block, monkeypatch):
    monkeypatch.setattr(module, "_CPU_BLOCK", block)
    plan = Plan(torch.tensor([0, *LENGTHS]).cumsum(0), 4, 8, tokens=sum(LENGTHS) + 2)
    student, q, rows, entries, sink = draw(plan)
    lists = some_lists(plan) if selected else None
    w = torch.rand(plan.tokens, dtype=torch.float64) if weighed else None
    want, lse = plain(student, plan, q, rows, entries, sink, lists, w)
    teacher = [x.requires_grad_() for x in (q, entries, lse.detach(), sink)]
    got = index_loss(*student, plan, *teacher, lists=lists, token_weights=w)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(2 * got, [*student, *teacher], allow_unused=True)
    assert ours[3:] == (None,) * 4
    for a, b in zip(ours, torch.autograd.grad(2 * want, student), strict=False):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_finite_differences():
    plan = Plan([0, 9, 16], 4, 4)
    student, q, rows, entries, sink = draw(plan)
    _, lse = plain(student, plan, q, rows, entries, sink, None)
    assert torch.autograd.gradcheck(
        lambda *x: index_loss(*x, plan, q, entries, lse.detach(), sink), student
    )


def test_a_teacher_without_the_window_is_another():
    """The denominator counts once heads are summed: a softmax over entries alone teaches wrong."""
    plan = Plan([0, 64], 4, 8)
    student, q, rows, entries, sink = draw(plan, spread=2.0)
    with torch.no_grad():
        right, lse = plain(student, plan, q, rows, entries, sink, None)
        _, alone = plain(student, plan, q, rows[:0], entries, sink, None)
        ours = index_loss(*student, plan, q, entries, lse, sink)
        wrong = index_loss(*student, plan, q, entries, alone, sink)
        no_sink = index_loss(*student, plan, q, entries, lse, None)
    assert abs(ours - right) < 1e-10
    assert abs(wrong - right) > 1e-2 * right
    assert abs(no_sink - right) > 1e-3 * right


def test_what_sees_nothing_or_is_saturated_teaches_nothing():
    plan = Plan([0, 3], 4, 8)
    student, q, _, entries, sink = draw(plan)
    lse = torch.zeros(3, HEADS, dtype=torch.float64)
    assert index_loss(*student, plan, q, entries, lse, sink) == 0
    plan = Plan([0, 12], 4, 8)
    student, q, _, entries, sink = draw(plan)
    lse = torch.full((12, HEADS), -torch.inf, dtype=torch.float64)
    for value in (-torch.inf, torch.inf):
        loss = index_loss(*student, plan, q, entries, lse, torch.full_like(sink, value))
        grads = torch.autograd.grad(loss, student)
        assert loss == 0
        assert not any(map(torch.any, grads))


def test_shapes_are_checked():
    plan = Plan([0, 12], 4, 8)
    student, q, _, entries, sink = draw(plan)
    lse = torch.zeros(12, HEADS, dtype=torch.float64)
    with pytest.raises(ValueError, match="index_loss: entries"):
        index_loss(*student, plan, q, entries[:2], lse, sink)
    with pytest.raises(TypeError, match="index_loss: lists"):
        index_loss(*student, plan, q, entries, lse, sink, lists=torch.zeros(12, 2))
