import math

import pytest
import torch

from anymla.testing.conformance.expected import attend
from anymla.testing.tolerance import (
    Bound,
    accumulation,
    assert_close,
    assert_identical,
    assert_unbiased,
    relative_error,
    ulps,
)


def test_bounds_carry_their_derivation_through_arithmetic() -> None:
    bound = 2 * ulps(torch.bfloat16, 1.5) + accumulation(64, torch.float32)
    assert float(bound) == 3 * 2.0**-7 + 16 * 2.0**-23
    assert "1.5 ulps of bfloat16" in bound.why
    assert "sqrt(64)" in bound.why
    assert torch.equal(Bound(2.0, "two") * torch.ones(3), torch.full((3,), 2.0))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bound_must_be_a_number_that_can_bound(value: float) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        Bound(value, "nonsense")


def test_half_an_ulp_holds_for_every_rounding_to_bfloat16() -> None:
    exact = torch.randn(10_000, dtype=torch.float64)
    assert_close(exact.bfloat16(), exact, rtol=ulps(torch.bfloat16, 0.5))


def test_the_accumulation_model_holds_for_real_dot_products_and_is_not_idle() -> None:
    n = 4096
    a, b = torch.randn(64, n), torch.randn(64, n)
    exact = (a.double() * b.double()).sum(-1)
    got = torch.zeros(64)
    for i in range(n):  # the worst order there is: one running sum
        got += a[:, i] * b[:, i]
    scale = (a.double() * b.double()).abs().sum(-1)
    used = assert_close(got, exact, atol=accumulation(n, torch.float32), scale=scale)
    assert used > 1e-4


def test_one_wrong_element_fails_and_is_named(capsys) -> None:
    want = torch.arange(6.0).view(2, 3)
    got = want.clone()
    got[1, 2] += 0.01
    with pytest.raises(AssertionError, match=r"1 of 6 elements exceed it; first at \[1, 2\]: got"):
        assert_close(got, want, atol=1e-3, name="sum")
    assert "sum: max |error| 0.01" in capsys.readouterr().out


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values_must_stand_at_the_same_places(special: float) -> None:
    want = torch.tensor([1.0, special])
    assert_close(want.clone(), want)
    with pytest.raises(AssertionError, match="differ in being"):
        assert_close(torch.tensor([1.0, 2.0]), want, atol=1e9)
    with pytest.raises(AssertionError, match="differ in being"):
        assert_close(torch.tensor([special, special]), want, atol=1e9)


def test_infinities_of_opposite_sign_differ() -> None:
    with pytest.raises(AssertionError, match=r"being \+inf"):
        assert_close(torch.tensor([math.inf]), torch.tensor([-math.inf]), atol=1e9)


def test_shapes_must_agree_and_empty_tensors_are_close() -> None:
    with pytest.raises(AssertionError, match=r"shape \[3\], expected \[1, 3\]"):
        assert_close(torch.zeros(3), torch.zeros(1, 3))
    assert assert_close(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_identical_sees_the_sign_of_zero_and_accepts_nan() -> None:
    assert_identical(torch.tensor([math.nan]), torch.tensor([math.nan]))
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_identical(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError, match=r"expected torch\.float64"):
        assert_identical(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_truncation_is_a_bias() -> None:
    exact = torch.rand(10_000, dtype=torch.float64) + 1
    assert_unbiased(exact.bfloat16(), exact)
    truncated = (exact * 128).floor() / 128
    with pytest.raises(AssertionError, match="rounded down"):
        assert_unbiased(truncated, exact)


def test_relative_error_is_relative_to_the_largest_value() -> None:
    assert relative_error(torch.tensor([1.0, 11.0]), torch.tensor([1.0, 10.0])) == pytest.approx(
        0.1
    )
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_lse_may_err_as_the_sums_of_terms_that_cancel() -> None:
    q, rows = torch.randn(50, 8, 512).bfloat16(), torch.randn(50, 20, 512)
    want = attend(q, list(rows.double()))
    assert want.score_norm.max() < 8  # Ordinary rows have the bound that they had without it.
    rows[:, :3] *= 1e5
    want = attend(q, list(rows.double()))
    order = torch.randperm(512)
    scores = torch.zeros(50, 8, 20)
    for part in order.split(16):
        scores += q[..., part].float() @ rows[..., part].mT
    want.check((want.out.bfloat16(), (scores * 512**-0.5).logsumexp(-1)))
    scores = q.double() @ rows.double().mT * 512**-0.5
    largest = scores.argmax(-1, keepdim=True)
    left_out = scores.scatter(-1, largest, -torch.inf).logsumexp(-1)
    part = order[:16]  # of the channels, missing from all scores
    short = scores - q[..., part].double() @ rows[..., part].double().mT * 512**-0.5
    for wrong in (left_out, short.logsumexp(-1)):
        allowed = want.score_norm.clamp(min=8.0) + want.lse.abs()
        error = (wrong - want.lse).abs() / (4 * 512**0.5 * 2.0**-23 * allowed)
        assert (error > 1).double().mean() > 0.98


def test_unlikely_rows_may_be_lost_to_float16_where_likely_ones_are_zero() -> None:
    rows = torch.randn(2, 512).double()
    q = rows[:1].bfloat16().view(1, 1, 512)
    rows[0, 7] = 0.0
    share = float(attend(q, [rows]).out[0, 0, 7] / rows[1, 7])
    assert 0 < share < 2.0**-20
    for more, fits in ((40.0, True), (22.0, False)):  # the score's excess, in powers of two
        want = attend(q * (more / -math.log2(share)), [rows])
        lost = want.out.clone()
        lost[0, 0, 7] = 0.0  # of 2^-more
        if fits:
            want.check((lost.bfloat16(), want.lse))
        else:
            with pytest.raises(AssertionError, match="1 of 512"):
                want.check((lost.bfloat16(), want.lse))
