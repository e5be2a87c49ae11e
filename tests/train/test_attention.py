"""Attention through autograd: what a training step sees."""

from __future__ import annotations

import itertools

import pytest
import torch

from anymla import train
from anymla.ops.attention import prefill_attention
from anymla.testing.oracle.gradients import attention_gradients
from anymla.testing.tolerance import assert_identical

LENGTHS = (0, 1, 3, 4, 5, 0, 127, 128, 129)
STARTS = list(itertools.accumulate(LENGTHS, initial=0))
EVERYTHING = ("q", "rows", "entries", "sink")


def inputs(plan, heads=2, dim=8, dtype=torch.float64, seed=0):
    """q, rows, entries and sink that want gradients."""
    torch.manual_seed(seed)
    shapes = (plan.tokens, heads, dim), (plan.tokens, dim), (plan.num_entries, dim)
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    made.append(torch.randn(heads, dtype=torch.float64 if dtype == torch.float64 else None))
    return [one.requires_grad_() for one in made]


def selected(plan, count):
    """Entries for each token: some it sees, some twice, and holes."""
    lists = torch.randint(-1, 40, (plan.tokens, count)).int()
    lists[lists >= plan.ranges[:, 3:]] = -1
    return lists


def loss_of(result):
    torch.manual_seed(1)
    return sum((torch.randn_like(one) * one.nan_to_num(neginf=0.0)).sum() for one in result)


def gradients(call, given):
    return torch.autograd.grad(loss_of(call(*given)), [one for one in given if one.requires_grad])


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_a_packed_batch_has_the_oracles_gradients(ratio, listed):
    plan = train.Plan(STARTS, ratio, 128)
    q, rows, entries, sink = given = inputs(plan)
    lists = selected(plan, 12) if listed else None
    out, lse = train.attention(q, rows, entries if ratio else None, plan, lists, sink)
    torch.manual_seed(1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)

    named = []
    for sequence, length in enumerate(LENGTHS):
        for position in range(length):
            begin = STARTS[sequence]
            seen = [begin + one for one in range(max(0, position - 127), position + 1)]
            first = plan.tokens + sum(n // ratio for n in LENGTHS[:sequence]) if ratio else 0
            visible = (position + 1) // ratio if ratio else 0
            chosen = lists[len(named)].tolist()[:visible] if listed else range(visible)
            named.append(seen + [first + one for one in chosen if one >= 0])
    want = attention_gradients(
        dout, q.detach(), torch.cat((rows, entries)).detach(), named, sink=sink.detach(), dlse=dlse
    )
    got = gradients(
        lambda *each: train.attention(
            each[0], each[1], each[2] if ratio else None, plan, lists, each[3]
        ),
        given if ratio else [q, rows, entries.detach(), sink],
    )
    torch.testing.assert_close(out, want.out)
    torch.testing.assert_close(lse, want.lse)
    drows = [want.drows[: plan.tokens]] + ([want.drows[plan.tokens :]] if ratio else [])
    for one, other in zip(got, (want.dq, *drows, want.dsink), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_gradcheck_and_finite_differences(listed):
    plan = train.Plan([0, 2, 2, 10], 4, 3)
    given = inputs(plan, dim=4)
    lists = selected(plan, 3) if listed else None

    def call(q, rows, entries, sink):
        return train.attention(q, rows, entries, plan, lists, sink)

    assert torch.autograd.gradcheck(call, given)
    kv = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[1, -1, 6, 1, 7, -9], [0, 5, 5, 5, 2, 3]] * 4 + [[-1] * 6] * 2).int()

    def flat(q, kv, sink):
        return train.sparse_attention(q, kv, indices, sink, 0.3, value_dim=3)[0]

    assert torch.autograd.gradcheck(flat, (given[0], kv, given[3]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_of_576_channels_whose_first_512_are_the_value(deterministic):
    """Attention of V3.2 and GLM, in the shapes in which frameworks have rows and lists."""
    torch.manual_seed(3)
    q, kv = torch.randn(5, 2, 576).double(), torch.randn(30, 1, 576).double()
    sink, indices = torch.randn(2).double(), torch.randint(-1, 33, (5, 1, 12)).int()
    indices[2, 0], indices[3, 0, 4:] = -1, 7
    leaves = [one.requires_grad_() for one in (q, kv, sink)]

    def call(q, kv, sink):
        return train.sparse_attention(
            q, kv, indices, sink, 0.05, value_dim=512, deterministic=deterministic
        )

    out, lse = call(*leaves)
    assert out.shape == (5, 2, 512)
    torch.manual_seed(1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = attention_gradients(
        dout, q.detach(), kv.detach().squeeze(1), indices.squeeze(1).tolist(), sink=sink.detach(),
        scale=0.05, dlse=dlse,
    )  # fmt: skip
    torch.testing.assert_close(out, want.out)
    torch.testing.assert_close(lse, want.lse)
    got = gradients(call, leaves)
    for one, other in zip(got, (want.dq, want.drows.unsqueeze(1), want.dsink), strict=True):
        torch.testing.assert_close(one, other)
    assert want.drows[:, 512:].any()


def test_the_forward_is_the_operation_that_serves():
    plan = train.Plan([0, 40, 70], 4, 16)
    q, rows, entries, sink = inputs(plan, dim=64, dtype=torch.bfloat16)
    got = train.attention(q, rows, entries, plan, None, sink)
    with torch.no_grad():
        want = prefill_attention(
            q, torch.cat((rows, entries)), plan.ranges, window=16, entries=plan.most_entries,
            sink=sink,
        )  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert_identical(one, other)


@pytest.mark.parametrize(
    "wanted", [each for n in (1, 2) for each in itertools.combinations(EVERYTHING, n)]
)
def test_frozen_inputs_skip_their_work(monkeypatch, wanted):
    plan = train.Plan([0, 9], 4, 3)
    given = inputs(plan)

    def call(*each):
        return train.attention(*each[:3], plan, None, each[3])

    every = dict(zip(EVERYTHING, gradients(call, given), strict=True))
    asked = []
    real = train.attention.__globals__["prefill_attention_backward"]

    def spy(*args, gradients, **kwargs):
        asked.append(gradients)
        return real(*args, gradients=gradients, **kwargs)

    monkeypatch.setitem(train.attention.__globals__, "prefill_attention_backward", spy)
    for name, one in zip(EVERYTHING, given, strict=True):
        one.requires_grad_(name in wanted)
    for name, one in zip(wanted, gradients(call, given), strict=True):
        assert_identical(one, every[name])
    rows = bool({"rows", "entries"} & {*wanted})
    assert asked == ["queries" if not rows else "all" if "q" in wanted else "rows"]


@pytest.mark.parametrize("place", [0, 1], ids=["out", "lse"])
def test_one_result_alone_may_be_used(place):
    plan = train.Plan([0, 5], 4, 3)

    def call(*each):
        return train.attention(*each[:3], plan, None, each[3])[place]

    assert torch.autograd.gradcheck(call, inputs(plan, dim=4))


def test_gradients_are_differentiated_once():
    plan = train.Plan([0, 9], 4, 3)
    q, rows, entries, sink = inputs(plan)
    out, _ = train.attention(q, rows, entries, plan, None, sink)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"train_attention_backward.* no autograd formula"):
        dq.sum().backward()


def test_deterministic_follows_torchs_switch(monkeypatch):
    seen = []
    real = train.attention.__globals__["prefill_attention_backward"]

    def spy(*args, deterministic, **kwargs):
        seen.append(deterministic)
        return real(*args, deterministic=deterministic, **kwargs)

    monkeypatch.setitem(train.attention.__globals__, "prefill_attention_backward", spy)
    plan = train.Plan([0, 9], 0, 3)
    q, rows, _, sink = inputs(plan)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for switch, asked in itertools.product((False, True), (None, False, True)):
            torch.use_deterministic_algorithms(switch)
            train.attention(q, rows, None, plan, None, sink, deterministic=asked)[
                0
            ].sum().backward()
            assert seen.pop() == (switch if asked is None else asked)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.compiles
@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_compiled_gradients_are_the_eager_ones(listed):
    torch.compiler.reset()
    plan = train.Plan([0, 4, 21], 4, 5)
    given = inputs(plan, dim=16, dtype=torch.float32)
    lists = selected(plan, 3) if listed else None

    def call(q, rows, entries, sink):
        out, lse = train.attention(q * 2, rows.sin(), entries, plan, lists, sink)
        flat, _ = train.sparse_attention(q, rows, plan.ranges, sink, value_dim=7)
        return out, lse, flat

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled, given), gradients(call, given), strict=True):
        assert_identical(one, other)
    torch.compiler.reset()


def test_operators_keep_torch_librarys_rules():
    plan = train.Plan([0, 9], 4, 3)
    q, rows, entries, sink = inputs(plan)
    numbers = (None, 3, 2, None, False)
    args = (q, rows, entries, plan.ranges, None, sink)
    torch.library.opcheck(torch.ops.anymla.train_attention, (*args, *numbers))


def test_activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    plan = train.Plan([0, 9], 4, 3)
    given = inputs(plan)

    def call(*each):
        return train.attention(*each[:3], plan, None, each[3])

    again = gradients(lambda *each: checkpoint(call, *each, use_reentrant=False), given)
    for one, other in zip(again, gradients(call, given), strict=True):
        assert_identical(one, other)


def test_wrong_arguments_are_named():
    plan = train.Plan([0, 9], 4, 3)
    q, rows, entries, _ = inputs(plan)
    with pytest.raises(ValueError, match="rows must be one for each token"):
        train.attention(q, rows[1:], entries, plan)
    with pytest.raises(ValueError, match="entries must be given for ratio 4"):
        train.attention(q, rows, None, plan)
    with pytest.raises(TypeError, match="entries must be of rows'"):
        train.attention(q, rows, entries.float(), plan)
    with pytest.raises(ValueError, match="value_dim must be from 1 to D=8"):
        train.sparse_attention(q, rows, plan.ranges, value_dim=9)
