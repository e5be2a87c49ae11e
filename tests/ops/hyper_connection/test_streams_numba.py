"""A site in one kernel, for few tokens on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops._few_tokens import FEW_TOKENS
from anymla.ops.device import numba_problem
from anymla.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import accumulation, assert_close, ulps

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")
OPTIONS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}
NARROW, WIDE = ulps(torch.bfloat16, 0.5), accumulation(1024, torch.float32)


def site(tokens, n, width):
    rows = (2 + n) * n
    return {
        "h": torch.randn(tokens, n, width).bfloat16(),
        "fn": torch.randn(rows, n * width) / (n * width) ** 0.5,
        "base": torch.randn(rows),
        "scale": 1 + 0.3 * torch.randn(3),
    }


def widened(given):
    return {name: each.double() for name, each in given.items()}


def check_gates(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        assert_close(one, other, atol=WIDE, rtol=WIDE)


@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
@pytest.mark.parametrize(("n", "width"), [(4, 256), (4, 100), (2, 40)])
def test_sites_are_the_reference_in_float64(tokens, n, width):
    given, norm = site(tokens, n, width), torch.rand(width) + 0.5
    y, *gates = hc_pre(**given, **OPTIONS, backend="numba")
    want, *exact = hc_pre(**widened(given), **OPTIONS, backend="reference")
    size = given["h"].double().abs().sum(1)
    assert_close(y, want, atol=WIDE, rtol=NARROW, scale=size)
    check_gates(gates, exact)
    # The norm reads the sum as it was rounded.
    normed, *_ = hc_pre(**given, norm_weight=norm, **OPTIONS, backend="numba")
    root = y.double().square().mean(-1, keepdim=True).add(1e-6).sqrt()
    assert_close(normed, y.double() / root * norm.double(), rtol=NARROW + WIDE)
    assert normed.dtype == torch.bfloat16

    u = torch.randn(tokens, width).bfloat16()
    out = hc_post(u, given["h"], *gates, backend="numba")
    wide = [each.double() for each in (u, given["h"], *gates)]
    want = hc_post(*wide, backend="reference")
    scale = hc_post(*(each.abs() for each in wide), backend="reference")
    assert_close(out, want, atol=WIDE, rtol=NARROW, scale=scale)
    weights = {name: given[name] for name in ("fn", "base", "scale")}
    streams, *both = hc_post_pre_norm(
        u, given["h"], *gates, **weights, norm_weight=norm, **OPTIONS, backend="numba"
    )
    assert torch.equal(streams, out)
    apart = hc_pre(out, **weights, norm_weight=norm, **OPTIONS, backend="numba")
    assert all(map(torch.equal, both, apart))


def test_streams_that_are_one_row_and_the_head():
    given = site(2, 4, 64)
    given["h"] = given["h"][:, :1].expand(-1, 4, -1)
    y, *gates = hc_pre(**given, **OPTIONS, backend="numba")
    want, *exact = hc_pre(**widened(given), **OPTIONS, backend="reference")
    assert_close(y, want, atol=8 * WIDE, rtol=NARROW)
    check_gates(gates, exact)
    given |= {"fn": given["fn"][:4], "base": given["base"][:4], "scale": given["scale"][:1]}
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6}
    y = hc_head(**given, **options, backend="numba")
    want = hc_head(**widened(given), **options, backend="reference")
    assert_close(y, want, atol=8 * WIDE, rtol=NARROW)


def test_tokens_do_not_reach_each_other():
    given = site(3, 4, 64)
    weights = {name: given[name] for name in ("fn", "base", "scale")}
    alone = hc_pre(given["h"][1:2], **weights, **OPTIONS, backend="numba")
    given["h"][0], given["h"][2] = torch.nan, torch.inf
    together = hc_pre(**given, **OPTIONS, backend="numba")
    for one, all_of_them in zip(alone, together, strict=True):
        assert torch.equal(one[0], all_of_them[1])
        assert all_of_them[0].isnan().all()


def test_what_is_taken():
    given = site(FEW_TOKENS + 1, 4, 64)
    with pytest.raises(BackendUnavailable, match="tokens"):
        hc_pre(**given, **OPTIONS, backend="numba")
    few = given | {"h": given["h"][:FEW_TOKENS]}
    assert hc_pre.resolve(**few, **OPTIONS).name == "numba"
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        hc_pre(**(few | {"h": few["h"].float()}), **OPTIONS, backend="numba")
    rows = QuantizedRows.empty(FEW_TOKENS, 64, torch.device("cpu"))
    quantised = {"codes": rows.codes, "code_scales": rows.scales}
    assert hc_pre.resolve(**few, **OPTIONS, **quantised).name == "torch"


def test_a_norm_of_every_second_number_lives_until_the_kernel_has_run():
    given, norm = site(1, 4, 4096), torch.rand(4096, 2)[:, 0] + 0.5
    spread = torch.stack([norm, norm], 1)[:, 0]
    assert not spread.is_contiguous()
    want, *_ = hc_pre(**given, norm_weight=norm.contiguous(), **OPTIONS, backend="numba")
    for _ in range(5):
        got, *_ = hc_pre(**given, norm_weight=spread, **OPTIONS, backend="numba")
        assert torch.equal(got, want)
