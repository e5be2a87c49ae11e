from __future__ import annotations

import dataclasses

import pytest
import torch
from paged import ALL_BACKENDS, use_backend
from prefill_cases import prefill

from anymla.ops.attention import prefill_attention, sparse_attention_rows
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import assert_identical, relative_l2


@pytest.fixture(params=ALL_BACKENDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
def test_against_the_float64_result(backend, listed, dtype, sink):
    few = backend == "triton"
    case = prefill(
        3 + listed,
        tokens=4 if few else 24,
        heads=3,
        dtype=dtype,
        listed=listed,
        entries=64 if few else 200,
        window=64 if few else 128,
        sink=sink,
    )
    out, lse = case.run(backend)
    want, want_lse = case.expected()
    # One rounding of the weights and one of the output; float32 accumulates 512 products.
    assert relative_l2(out, want) < (4e-3 if dtype == torch.bfloat16 else 3e-6)
    finite = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert torch.equal(lse[~finite].double(), want_lse[~finite])
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], atol=1e-4, rtol=1e-4)


def test_is_the_listed_attention_of_the_same_rows(backend):
    case = prefill(
        5, tokens=4, heads=2, dtype=torch.float32, listed=False, entries=70, hostile=False
    )
    out, lse = case.run(backend)
    for token, (start, count, base, more) in enumerate(case.ranges.tolist()):
        seen = [*range(start, start + min(count, 128)), *range(base, base + min(more, 70))]
        index = torch.tensor([seen], dtype=torch.int32).view(1, -1)
        alone, alone_lse = sparse_attention_rows(
            case.q[token : token + 1], case.rows, index, sink=case.sink, backend="torch"
        )
        torch.testing.assert_close(out[token], alone[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[token], alone_lse[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_what_is_not_named_never_arrives(backend, listed):
    case = prefill(7, tokens=3, heads=2, dtype=torch.bfloat16, listed=listed, entries=40, rows=300)
    want, want_lse = case.run(backend)
    named = torch.zeros(300, dtype=torch.bool)
    for token, (start, count, base, more) in enumerate(case.ranges.tolist()):
        seen = [*range(start, start + min(count, 128))]
        if listed:
            seen += [base + j for j in case.lists[token, : max(more, 0)].tolist() if j >= 0]
        else:
            seen += [*range(base, base + min(more, 40))]
        named[[row for row in seen if 0 <= row < 300]] = True
    assert not named.all()
    poisoned = dataclasses.replace(case, rows=case.rows.masked_fill(~named[:, None], torch.nan))
    out, lse = poisoned.run(backend)
    assert_identical(out, want)
    assert_identical(lse, want_lse)


def test_tokens_that_see_nothing(backend):
    case = prefill(1, tokens=3, heads=2, dtype=torch.bfloat16, listed=False, entries=8, rows=50)
    case.ranges[:, 1] = torch.tensor([0, -4, 5])
    case.ranges[:, 3] = 0
    case.ranges[2, 0] = 50
    out, lse = case.run(backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_writes_where_it_is_told(backend):
    case = prefill(2, tokens=2, heads=2, dtype=torch.bfloat16, listed=True, entries=8)
    want, _ = case.run(backend)
    out = torch.zeros_like(case.q)
    given, _ = case.run(backend, out=out)
    assert given is out
    assert_identical(out, want)
    wide = torch.zeros(case.q.shape)
    given, _ = case.run(backend, out=wide)
    assert given is wide
    torch.testing.assert_close(wide, want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("values", [64, 512, 576])
def test_values_may_be_a_part_of_the_row(backend, listed, values):
    case = prefill(
        9, tokens=3, heads=2, dtype=torch.bfloat16, listed=listed, entries=40, window=20, dim=576
    )
    out, lse = case.run(backend, value_dim=values)
    want, want_lse = case.expected()
    assert out.shape == (3, 2, values)
    assert relative_l2(out, want[..., :values]) < 4e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
    into = torch.zeros_like(out)
    given, _ = case.run(backend, value_dim=values, out=into)
    assert given is into
    assert_identical(into, out)


def test_no_tokens(backend):
    case = prefill(2, tokens=0, heads=2, dtype=torch.bfloat16, listed=True, entries=8)
    out, lse = case.run(backend)
    assert out.shape == (0, 2, 512)
    assert lse.shape == (0, 2)


def test_arguments_are_checked():
    case = prefill(2, tokens=2, heads=2, dtype=torch.bfloat16, listed=True, entries=8)
    with pytest.raises(ValueError, match="window must be at least 0"):
        prefill_attention(case.q, case.rows, case.ranges, window=-1)
    with pytest.raises(ValueError, match="value_dim must be from 1 to D=512, got 513"):
        case.run(None, value_dim=513)
    with pytest.raises(ValueError, match=r"out must be .*\[T=2, H=2, V=448\]"):
        case.run(None, value_dim=448, out=torch.zeros(2, 2, 512))
    with pytest.raises(TypeError, match="ranges must be int32"):
        prefill_attention(case.q, case.rows, case.ranges.long(), window=128)


def test_the_hopper_kernel_says_why_not():
    case = prefill(2, tokens=2, heads=2, dtype=torch.bfloat16, listed=True, entries=8)
    with pytest.raises(BackendUnavailable, match="gluon_sm90"):
        case.run("gluon_sm90")
