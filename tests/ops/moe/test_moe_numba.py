"""What numba's experts promise beyond the contract."""

from __future__ import annotations

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.device import numba_problem
from anymla.ops.moe import config, experts
from anymla.ops.registry import BackendUnavailable
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
    with pytest.raises(BackendUnavailable, match="got plain"):
        experts(
            torch.zeros(1, D), ids, weights, *plain, [], [], [], weight_format="plain",
            swiglu_limit=2.0, quantize_activations=False, backend="numba",
        )  # fmt: skip
