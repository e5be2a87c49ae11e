"""What numba's experts promise beyond the contract."""

from __future__ import annotations

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops._few_tokens import FEW_TOKENS
from anymla.ops.device import numba_problem
from anymla.ops.moe import config, experts, route_biased, route_hash, swiglu
from anymla.ops.registry import BackendUnavailable, skip_checks
from anymla.testing.tolerance import accumulation, assert_close, ulps

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")

D, INNER, COUNT = 160, 96, 9


def bank_of(weight_format):
    quantize = quantize_fp8_weight if weight_format == "fp8" else quantize_mxfp4
    given = {}
    for name, rows, columns in (("1", INNER, D), ("3", INNER, D), ("2", D, INNER)):
        pairs = [quantize(torch.randn(rows, columns) / columns**0.5) for _ in range(COUNT)]
        given["w" + name] = [codes for codes, _ in pairs]
        given["s" + name] = [scale for _, scale in pairs]
    return given | {"weight_format": weight_format, "swiglu_limit": 2.0}


@pytest.mark.parametrize("weight_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pairs_may_be_cut_into_several(weight_format, dtype, monkeypatch):
    given = bank_of(weight_format) | {"quantize_activations": False, "backend": "numba"}
    x = torch.randn(12, D).to(dtype)
    ids = torch.rand(12, COUNT).argsort(1)[:, :3].int()
    ids[3, 1], ids[7] = -1, COUNT
    weights = torch.rand(12, 3)
    whole = experts(x, ids, weights, **given)
    monkeypatch.setattr("anymla.ops.moe.numba_experts.MAX_NUMBA_PAIRS", 7)
    # Products have the same bits; torch's silu rounds by where in memory a value lies, and what
    # it is multiplied by is rounded to the dtype.
    error = accumulation(D, torch.float32, 8) + ulps(dtype, 2)
    assert_close(experts(x, ids, weights, **given), whole, atol=error)


def test_threads_share_the_experts():
    given = bank_of("mxfp4") | {"quantize_activations": True, "backend": "numba"}
    for name, rows, columns in (("1", 1024, 2048), ("3", 1024, 2048), ("2", 2048, 1024)):
        pairs = [quantize_mxfp4(torch.randn(rows, columns) / columns**0.5) for _ in range(3)]
        given["w" + name], given["s" + name] = map(list, zip(*pairs, strict=True))
    x, weights = torch.randn(3, 2048).bfloat16(), torch.rand(3, 2)
    ids = torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(experts(x, ids, weights, **given))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_what_is_refused_and_what_is_chosen():
    given = bank_of("fp8") | {"quantize_activations": False}
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with pytest.raises(BackendUnavailable, match="x is float64"):
        experts(torch.zeros(1, D).double(), ids, weights, **given, backend="numba")
    assert experts.resolve(torch.zeros(1, D), ids, weights, **given).name == "numba"
    tokens = config._NUMBA_PAIRS_AN_EXPERT * COUNT + 1
    many = torch.zeros(tokens, D), ids.expand(tokens, 1).clone(), weights.expand(tokens, 1).clone()
    assert experts.resolve(*many, **given).name == "torch"
    plain = [torch.zeros(INNER, D)], [torch.zeros(INNER, D)], [torch.zeros(D, INNER)]
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        experts(
            torch.zeros(1, D), ids, weights, *plain, [], [], [], weight_format="plain",
            swiglu_limit=2.0, quantize_activations=False, backend="numba",
        )  # fmt: skip


@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
def test_routers_are_the_reference_in_float64(tokens):
    x, gate, bias = torch.randn(tokens, D).bfloat16(), torch.randn(24, D) / D**0.5, torch.randn(24)
    valid = torch.tensor([True, False, True, True])[:tokens]
    given = {"k": 6, "scale": 2.5, "is_valid": valid}
    ids, weights = route_biased(x, gate, bias, **given, backend="numba")
    wide = x.double(), gate.double(), bias.double()
    want, exact = route_biased(*wide, **given, backend="reference")
    assert torch.equal(ids, want)
    assert_close(weights, exact, atol=ulps(torch.float32, 16))
    table = torch.rand(50, 24).argsort(1)[:, :3]
    token_ids = torch.tensor([3, 50, -1, 49])[:tokens]
    ids, weights = route_hash(x, gate, token_ids, table, scale=1.5, backend="numba")
    want, exact = route_hash(*wide[:2], token_ids, table, scale=1.5, backend="reference")
    assert torch.equal(ids, want)
    assert_close(weights, exact, atol=ulps(torch.float32, 16))


def test_routers_of_equal_extreme_and_missing_scores():
    x, gate, bias = torch.ones(1, D).bfloat16(), torch.zeros(300, D), torch.zeros(300)
    bias[[7, 250]] = 1.0
    ids, weights = route_biased(x, gate, bias, k=5, scale=1.0, backend="numba")
    assert ids.tolist() == [[7, 250, 0, 1, 2]]
    assert_close(weights, torch.full((1, 5), 0.2), rtol=ulps(torch.float32, 2))
    for value, weight in ((-10.0, 0.0), (10.0, 0.5)):
        gate = torch.full((8, D), value)
        _, weights = route_biased(x, gate, bias[:8], k=3, scale=1.5, backend="numba")
        assert weights.tolist() == [[weight] * 3]
    gate[5] = torch.nan
    ids, weights = route_biased(x, gate, 0 * bias[:8], k=3, scale=1.5, backend="numba")
    want, others = route_biased(x, gate, 0 * bias[:8], k=3, scale=1.5, backend="torch")
    assert torch.equal(ids, want)
    assert torch.equal(weights.isnan(), others.isnan())


@pytest.mark.parametrize("expert", [8, -1, 2**40])
def test_an_expert_that_is_not_there_is_refused(expert):
    x, gate = torch.randn(1, 64).bfloat16(), torch.randn(8, 64)
    table = torch.tensor([[1, expert]]).expand(10, 2)
    with pytest.raises(IndexError, match="tid2eid"):
        route_hash(x, gate, torch.tensor([3]), table, scale=1.0, backend="numba")


@pytest.mark.parametrize("wrong", [torch.randn(INNER // 2, D).bfloat16(), torch.randn(INNER, D)])
def test_an_expert_unlike_the_first_is_refused(wrong):
    """Its memory is read as the first one's."""
    up = [torch.randn(INNER, D).bfloat16() for _ in range(3)]
    down = [torch.randn(D, INNER).bfloat16() for _ in range(3)]
    given = {
        "w1": up, "w3": list(up), "w2": down, "s1": [], "s3": [], "s2": [],
        "weight_format": "plain", "swiglu_limit": 2.0, "quantize_activations": False,
    }  # fmt: skip
    x, ids = torch.randn(1, D).bfloat16(), torch.tensor([[0, 2]], dtype=torch.int32)
    experts(x, ids, torch.rand(1, 2), **given, backend="numba")
    given["w3"][2] = wrong
    with pytest.raises((TypeError, ValueError), match=r"experts: w3\[2\] must be"):
        experts(x, ids, torch.rand(1, 2), **given, backend="numba")
    with skip_checks(), pytest.raises(ValueError, match="expert 2"):
        experts(x, ids, torch.rand(1, 2), **given, backend="numba")


def test_swiglu_clamps_the_gate_from_above_only():
    gate = torch.tensor([[-200.0, -30.0, -2.0, 0.5, 9.0, 11.0, 300.0, torch.nan]]).bfloat16()
    up = torch.tensor([[1.0, 3.0, -12.0, 12.0, -0.25, -300.0, 1.0, 1.0]]).bfloat16()
    got = swiglu(gate, up, 10.0, backend="numba")
    want = swiglu(gate.double(), up.double(), 10.0, backend="reference")
    assert_close(got, want, rtol=ulps(torch.bfloat16, 1), atol=1e-30)
    halves = torch.cat((gate, up), 1).repeat(3, 1).chunk(2, dim=1)
    assert torch.equal(swiglu(*halves, 10.0, backend="numba")[:, :-1], got.repeat(3, 1)[:, :-1])


@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
@pytest.mark.parametrize("stacked", [False, True])
def test_plain_experts(tokens, stacked):
    given = {"weight_format": "plain", "swiglu_limit": 2.0, "quantize_activations": False}
    for name, rows, columns in (("1", INNER, D), ("3", INNER, D), ("2", D, INNER)):
        bank = (torch.randn(COUNT, rows, columns) / columns**0.5).bfloat16()
        given |= {"w" + name: bank if stacked else list(bank), "s" + name: []}
    x, shared = torch.randn(tokens, D).bfloat16(), torch.randn(tokens, D).bfloat16()
    ids = torch.rand(tokens, COUNT).argsort(1)[:, :3].int() + 4
    ids[0, 1] = 2  # of another rank
    weights = torch.rand(tokens, 3)
    more = {"expert_offset": 4, "shared": shared}
    out = experts(x, ids, weights, **given, **more, backend="numba")
    wide = {
        name: [each.double() for each in value]
        if name[0] == "w" and name != "weight_format"
        else value
        for name, value in given.items()
    }
    want = experts(
        x.double(), ids, weights.double(), **wide, expert_offset=4, shared=shared.double(),
        backend="reference",
    )  # fmt: skip
    # Gate, up, what w2 reads and its product are rounded to bfloat16, each of size about one.
    assert_close(out, want, atol=ulps(torch.bfloat16, 8), rtol=ulps(torch.bfloat16, 1), scale=2.0)
    alone = experts(
        x[-1:], ids[-1:], weights[-1:], **given, expert_offset=4, shared=shared[-1:],
        backend="numba",
    )  # fmt: skip
    assert torch.equal(alone, out[-1:])
    nobody = torch.full_like(ids, -1)
    assert torch.equal(experts(x, nobody, weights, **given, **more, backend="numba"), shared)
