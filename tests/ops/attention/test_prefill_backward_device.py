"""Gradients of attention on a GPU, in sizes for which the interpreter is too slow."""

from __future__ import annotations

import pytest
import torch
from paged import a_device

from anymla import train
from anymla.ops.attention import prefill_attention_backward
from anymla.ops.device import target_of
from anymla.testing.tolerance import relative_l2
from lab.backward_tiles import Call, Shape

pytestmark = pytest.mark.gpu
SHAPES = [Shape(heads, topk, whole, tokens=96) for heads, topk, whole in (
    (64, 200, 0), (128, 64, 0), (20, 0, 77), (8, 0, 0), (64, 0, 300),
)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_against_torch(shape, deterministic):
    call = Call(shape, a_device())
    want = call.run("torch")
    got = call.run(deterministic=deterministic)
    # p, dS and the result are rounded to bfloat16 here, and the result alone there.
    assert max(relative_l2(one, other) for one, other in zip(got, want, strict=True)) < 6e-3
    if deterministic:
        again = call.run(deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("shape", [one for one in SHAPES if one.heads % 64 == 0], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_kernels_against_torch(shape, deterministic):
    if target_of(a_device()).name != "sm_90":
        pytest.skip("Hopper")
    call = Call(shape, a_device())
    want = call.run("torch")
    got = call.run("gluon_sm90", deterministic=deterministic)
    assert max(relative_l2(one, other) for one, other in zip(got, want, strict=True)) < 6e-3
    if deterministic:
        again = call.run("gluon_sm90", deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("heads", [64, 20])
def test_packed_is_alone_bit_for_bit(heads):
    """Sequences whose rows begin in the middle of a tile."""
    torch.manual_seed(0)
    lengths, device = (77, 300, 5), a_device()
    parts = [
        [torch.randn(length, *more, device=device).bfloat16() for more in ((heads, 512), (512,))]
        + [torch.randn(length // 4, 512, device=device).bfloat16()]
        for length in lengths
    ]
    lists = [
        torch.randint(-1, max(length // 4, 1), (length, 24), device=device).int()
        for length in lengths
    ]

    def gradients(chosen, starts):
        given = [
            torch.cat([parts[one][place] for one in chosen]).requires_grad_() for place in range(3)
        ]
        plan = train.Plan(starts, 4, 128, device=device)
        listed = torch.cat([lists[one] for one in chosen])
        with torch.enable_grad():
            out, lse = train.attention(*given, plan, listed, deterministic=True)
            found = torch.autograd.grad(out.float().square().sum(), given)
        return found, torch.cat([out.flatten(1).float(), lse], 1)

    whole, forward = gradients((0, 1, 2), [0, 77, 377, 382])
    cut = [
        one.split([length // ratio for length in lengths])
        for one, ratio in zip(whole, (1, 1, 4), strict=True)
    ]
    for number, (length, outputs) in enumerate(zip(lengths, forward.split(lengths), strict=True)):
        alone, output = gradients((number,), [0, length])
        if not torch.equal(output, outputs):
            pytest.skip("this target's forward has other bits in another batch")
        for one, other in zip(alone, cut, strict=True):
            assert torch.equal(one, other[number])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_keys_of_576_channels_whose_first_512_are_the_value(heads, deterministic):
    """V3.2's sizes, beside torch's gradients of the same output."""
    torch.manual_seed(0)
    device = a_device()
    q = torch.randn(70, heads, 576, device=device).bfloat16()
    kv = torch.randn(900, 576, device=device).bfloat16()
    sink = torch.randn(heads, device=device)
    lists = torch.randint(-3, 905, (70, 333), device=device).int()
    out, lse = train.sparse_attention(q, kv, lists, sink, scale=192**-0.5, value_dim=512)
    dout = torch.randn_like(out)
    ranges = torch.zeros(70, 4, dtype=torch.int32, device=device)
    ranges[:, 3] = 333
    arguments = (dout, q, kv, ranges, lists, out, lse)
    call = {"window": 0, "sink": sink, "scale": 192**-0.5}
    got = prefill_attention_backward(
        *arguments, **call, deterministic=deterministic, backend="triton"
    )
    want = prefill_attention_backward(*arguments, **call, backend="torch")
    assert max(relative_l2(one, other) for one, other in zip(got, want, strict=True)) < 6e-3


def test_windows_of_576_channels():
    """Rows of windows, summed tile by tile, of which the last tile is not whole."""
    torch.manual_seed(0)
    device = a_device()
    q, dout = (torch.randn(50, 20, channels, device=device).bfloat16() for channels in (576, 512))
    rows = torch.randn(77, 576, device=device).bfloat16()
    token = torch.arange(50, device=device, dtype=torch.int32)
    ranges = torch.stack((token, token % 40, 0 * token, 0 * token), 1)
    lse = torch.randn(50, 20, device=device) + 3
    arguments = (dout, q, rows, ranges, None, dout, lse)
    want = prefill_attention_backward(*arguments, window=32, backend="torch")
    got = prefill_attention_backward(*arguments, window=32, deterministic=True, backend="triton")
    assert max(relative_l2(one, other) for one, other in zip(got[:2], want, strict=False)) < 6e-3


def test_rows_behind_2_to_the_31_elements():
    device, dim, heads = a_device(), 512, 16
    far = 2**31 // dim + 1000
    q, dout = (torch.randn(4, heads, dim, device=device).bfloat16() for _ in range(2))
    rows = torch.empty(far + 8, dim, device=device, dtype=torch.bfloat16)
    rows[far:] = torch.randn(8, dim, device=device).bfloat16()
    ranges = torch.tensor([[far, 2, far, 4]] * 4, dtype=torch.int32, device=device)
    lists = torch.tensor([[1, 3, 3, 5]] * 4, dtype=torch.int32, device=device)
    listed = torch.tensor([0, 1, 1, 3, 3, 5], device=device)  # a window of two, and the list
    scores = q.double() @ rows[far:][listed].double().T * dim**-0.5
    lse = scores.logsumexp(-1).float()
    call = {"window": 2, "entries": 4}
    near = ranges - torch.tensor([far, 0, far, 0], device=device).int()
    want = prefill_attention_backward(
        dout, q, rows[far:].clone(), near, lists, dout, lse, **call, backend="torch"
    )
    for deterministic in (False, True):
        got = prefill_attention_backward(
            dout, q, rows, ranges, lists, dout, lse, **call, deterministic=deterministic
        )
        assert relative_l2(got[0], want[0]) < 6e-3
        assert relative_l2(got[1][far:], want[1]) < 6e-3
        del got


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_gives_the_eager_gradients(deterministic):
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs")
    call = Call(Shape(64, 64, tokens=32), a_device())
    more = {"deterministic": deterministic}
    want = call.run(**more)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = call.run(**more)
    for one in got:
        one.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) if deterministic else relative_l2(one, other) < 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_grows_with_tokens_alone(deterministic):
    """At 65,536 tokens: what is saved, gradients, float32 rows, and the bounded addends."""
    if not torch.cuda.is_available():
        pytest.skip("asks CUDA for its peak")
    tokens, heads, dim, device = 65_536, 8, 512, a_device()
    plan = train.Plan([0, tokens], 128, 128, device=device)
    with torch.enable_grad():
        q, rows, entries = (
            torch.randn(shape, device=device).bfloat16().requires_grad_()
            for shape in ((tokens, heads, dim), (tokens, dim), (plan.num_entries, dim))
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = train.attention(q, rows, entries, plan, deterministic=deterministic)
        out.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    # The portable forward writes lists of 128 + 512 columns; a score alone would be 32 GiB.
    assert peak < 4 * q.nbytes + 8 * tokens * 640 * 8 + (2 << 30)
