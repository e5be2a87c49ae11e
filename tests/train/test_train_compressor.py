"""Pooled entries: gradients against autograd, entries against the serving compressor."""

import pytest
import torch

from anymla.formats.page_layout import get_layout
from anymla.ops.compressor import compress_norm_rope_insert, save_partial_states
from anymla.train import compressor
from anymla.train.compressor import compress
from anymla.train.plan import Plan

EPS = 1e-6
PACKED = [0, 5, 128, 3, 0, 129, 4, 1, 127, 260]


@pytest.fixture(autouse=True)
def gradients(inference_rules):
    with torch.enable_grad():
        yield


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(tokens, ratio, width, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    wide = width * (2 if ratio == 4 else 1)
    kv, gate = torch.randn(2, tokens, wide, generator=g, dtype=dtype)
    ape = torch.randn(ratio, wide, generator=g, dtype=dtype)
    weight = 1 + 0.2 * torch.randn(width, generator=g, dtype=dtype)
    angle = torch.rand(512, 2 if width < 64 else 32, generator=g, dtype=dtype) * 6
    return [kv, gate, ape, weight], torch.cat((angle.cos(), angle.sin()), 1)


def rotated(row, at, table):
    cos, sin = table[at].chunk(2)
    even, odd = row[-4::2], row[-3::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten()
    return torch.cat((row[:-4], turned))


def plain(kv, gate, ape, weight, lengths, ratio, table):
    """The formula, window by window, for autograd."""
    width, out = len(weight), []
    for begin, length in zip(starts(lengths).tolist(), lengths, strict=False):
        for window in range(length // ratio):
            own = torch.arange(ratio) + begin + window * ratio
            parts = [(own, slice(kv.shape[1] - width, None))]
            if ratio == 4 and window:
                parts.insert(0, (own - ratio, slice(width)))
            values = torch.cat([kv[t, half] for t, half in parts])
            scores = torch.cat([gate[t, half] + ape[:, half] for t, half in parts])
            c = (scores.softmax(0) * values).sum(0)
            row = c * (c.square().mean() + EPS).rsqrt() * weight
            out.append(row if table is None else rotated(row, window * ratio, table))
    return torch.stack(out)


@pytest.mark.parametrize("ratio", [4, 8, 128])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("block", [1 << 24, 1])
def test_gradients_of_packed_sequences(ratio, turns, block, monkeypatch):
    monkeypatch.setattr(compressor, "_BLOCK", block if ratio < 128 else 1 << 24)
    tokens = sum(PACKED) + 3  # and padding behind the last sequence
    inputs, table = draw(tokens, ratio, 6)
    table = table if turns else None
    with torch.no_grad():
        inputs[0][-3:] = torch.nan
        inputs[1][-3:] = torch.nan
    for x in inputs:
        x.requires_grad_()
    plan = Plan(starts(PACKED), ratio, tokens=tokens)
    ours = compress(*inputs, plan, eps=EPS, rope=table)
    theirs = plain(*inputs, PACKED, ratio, table)
    assert len(ours) == plan.num_entries
    count = len(theirs)
    torch.testing.assert_close(ours[:count], theirs, rtol=1e-12, atol=1e-12)
    assert not ours[count:].any()
    pull = torch.randn(ours.shape, dtype=ours.dtype)
    got = torch.autograd.grad(ours, inputs, pull)
    want = torch.autograd.grad(theirs, inputs, pull[:count])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ratio", [4, 8])
def test_finite_differences(ratio):
    inputs, table = draw(19, ratio, 6)
    plan = Plan(starts([9, 10]), ratio)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: compress(*x, plan, eps=EPS, rope=table), inputs)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("width", [512, 128])
def test_entries_are_those_that_serve_in_any_chunks(ratio, width):
    """Bit for bit: each sequence alone, its prompt in chunks of unequal length."""
    lengths = [300, 3, 129] if ratio == 128 else [41, 3, 129]
    inputs, table = draw(sum(lengths), ratio, width, torch.float32)
    plan = Plan(starts(lengths), ratio)
    ours = compress(*inputs, plan, eps=EPS, rope=table)
    parts = []
    for begin, length in zip(starts(lengths).tolist(), lengths, strict=False):
        kv, gate = (x[begin : begin + length] for x in inputs[:2])
        parts.append(served(kv, gate, *inputs[2:], table, ratio, [7, 1, 20, 1, 1000]))
    assert torch.equal(ours[: sum(map(len, parts))], torch.cat(parts))


def served(kv, gate, ape, weight, table, ratio, chunks):
    """Entries of one request out of the paged cache, as an engine writes them."""
    length, width, size = len(kv), len(weight), 16
    layout = get_layout(f"rows_fp32_{width}")
    pages = torch.randperm(-(-length // size)).int()
    state = torch.full((len(pages), size, 2 * kv.shape[1]), torch.nan)
    cache = layout.allocate(3, 64)
    at = 0
    for chunk in chunks:
        position = torch.arange(min(at, length), min(at + chunk, length))
        at += chunk
        slot = pages.long()[position // size] * size + position % size
        closes = (position + 1) % ratio == 0
        save_partial_states(
            kv[position], gate[position], ape, position, state, slot, compress_ratio=ratio
        )
        compress_norm_rope_insert(
            state, pages[None], slot, torch.zeros(len(position), dtype=torch.int32), position,
            weight, EPS, table, cache, torch.where(closes, position // ratio, -1),
            compress_ratio=ratio, overlap=ratio == 4, layout=layout.layout_id,
        )  # fmt: skip
    return cache.flatten(0, 1)[: length // ratio]


def test_a_packed_batch_is_its_sequences_alone():
    inputs, table = draw(sum(PACKED), 4, 128, torch.float32)
    inputs = [x.requires_grad_() for x in inputs]
    ours = compress(*inputs, Plan(starts(PACKED), 4), eps=EPS, rope=table)
    pull = torch.randn(ours.shape)
    grads = torch.autograd.grad(ours, inputs[:2], pull)
    entry = 0
    for begin, length in zip(starts(PACKED).tolist(), PACKED, strict=False):
        part = slice(begin, begin + length)
        own = [x[part].detach().requires_grad_() for x in inputs[:2]]
        alone = compress(*own, *inputs[2:], Plan(starts([length]), 4), eps=EPS, rope=table)
        rows = slice(entry, entry + length // 4)
        entry += length // 4
        assert torch.equal(alone, ours[rows])
        for a, b in zip(torch.autograd.grad(alone, own, pull[rows]), grads, strict=True):
            assert torch.equal(a, b[part])


def test_what_does_not_fit_the_plan_is_refused():
    inputs, table = draw(16, 4, 6)
    for plan in (Plan([0, 16], 8), Plan([0, 12], 4)):
        with pytest.raises(ValueError, match="plan's ratio"):
            compress(*inputs, plan, eps=EPS, rope=table)
    with pytest.raises(ValueError, match=r"\[T, D\] or \[T, 2 D\]"):
        compress(*inputs[:3], inputs[3][:5], Plan([0, 16], 4), eps=EPS, rope=table)
