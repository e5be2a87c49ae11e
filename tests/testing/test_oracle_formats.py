"""The oracle's own codecs against torch's casts and against anymla.formats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.formats.page_layout import get_layout
from anymla.testing.oracle import rounding
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries

LAYOUTS = list(ROW_FORMATS)


def random_rows(layout_id: str, n: int, seed: int = 0) -> torch.Tensor:
    """Rows whose blocks differ in size, with zeros, ties and values that saturate nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, ROW_FORMATS[layout_id].channels, generator=generator)
    rows *= torch.exp2(torch.randint(-12, 6, rows.shape, generator=generator).float())
    rows[::3, :64] = 0
    return rows.bfloat16().float()


def test_e4m3_equals_torch_for_all_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(rounding.decode_e4m3(codes), want, rtol=0, atol=0, equal_nan=True)


def test_rounding_equals_torch_casts() -> None:
    x = torch.randn(20_000) * torch.exp2(torch.randint(-14, 8, (20_000,)).float())
    x = x.clamp(-448, 448)
    want = x.to(torch.float8_e4m3fn).double()
    assert torch.equal(rounding.round_to(x.double(), rounding.e4m3_values()), want)
    assert torch.equal(rounding.to_bfloat16(x.double()), x.bfloat16().double())


def test_ties_go_to_even() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=torch.float64)
    want = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6], dtype=torch.float64)
    for sign in (1, -1):
        got = rounding.round_to(sign * midpoints, rounding.e2m1_values())
        assert torch.equal(got, sign * want)
    half = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8], dtype=torch.float64)
    assert rounding.to_bfloat16(half).tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize("power", [-20, -1, 0, 1, 7])
def test_scale_exponent_is_exact_at_powers_of_two(power: int) -> None:
    exact = torch.tensor(448.0 * 2.0**power, dtype=torch.float64)
    assert rounding.scale_exponent(exact, 448.0) == power
    assert rounding.scale_exponent(exact * (1 + 1e-12), 448.0) == power + 1


def test_hadamard_is_orthogonal_and_symmetric() -> None:
    x = torch.randn(5, 128, dtype=torch.float64)
    torch.testing.assert_close(rounding.hadamard(rounding.hadamard(x)), x)


@pytest.mark.parametrize("layout_id", LAYOUTS)
def test_both_codecs_agree(layout_id: str) -> None:
    rows = random_rows(layout_id, 30)
    data, scales = get_layout(layout_id).encode(rows)
    stored = ROW_FORMATS[layout_id].decode(data, torch.empty(0) if scales is None else scales)
    assert torch.equal(stored, ROW_FORMATS[layout_id].round(rows.double()))


@pytest.mark.parametrize("layout_id", LAYOUTS)
@pytest.mark.parametrize("entries", [1, 2, 64])
def test_entries_are_read_from_where_the_layout_writes_them(layout_id: str, entries: int) -> None:
    layout = get_layout(layout_id)
    cache = layout.allocate(7, entries, fill=0xFF)[1::2]
    slots = torch.randperm(3 * entries)
    rows = random_rows(layout_id, len(slots))
    layout.write(cache, slots, rows)
    data, scales = read_entries(cache, slots, layout_id)
    want_data, want_scales = layout.encode(rows)
    assert torch.equal(data, want_data)
    assert want_scales is None or torch.equal(scales, want_scales)


@pytest.mark.parametrize("layout_id", LAYOUTS)
@given(error=st.sampled_from([1e-7, 1e-5, 1e-3, 3e-2]), seed=st.integers(0, 100))
def test_rounding_of_a_disturbed_row_is_explained_by_the_error(
    layout_id: str, error: float, seed: int
) -> None:
    exact = random_rows(layout_id, 8, seed).double()
    size = exact.square().mean(1, keepdim=True).sqrt()
    noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    disturbed = (exact + error * size * noise).float()
    data, scales = get_layout(layout_id).encode(disturbed)
    scales = data[:, :0] if scales is None else scales
    # The row passed through float32 on its way, which is part of the error.
    slack = error * size + exact.abs() * torch.finfo(torch.float32).eps
    slack += torch.finfo(torch.float32).eps * error * size
    assert ROW_FORMATS[layout_id].explains(data, scales, exact - slack, exact + slack).all()


@pytest.mark.parametrize("layout_id", LAYOUTS)
def test_any_other_byte_is_not_explained(layout_id: str) -> None:
    exact = random_rows(layout_id, 1).double()
    exact[:, 64:] += 0.01
    row_format = ROW_FORMATS[layout_id]
    data, scales = get_layout(layout_id).encode(exact.float())
    scales = data[:, :0] if scales is None else scales
    exact = exact.float().double()
    assert row_format.explains(data, scales, exact, exact).all()
    for place in torch.randint(0, data.shape[1], (40,)).tolist():
        wrong = data.clone()
        wrong[0, place] ^= 1 << int(torch.randint(0, 7, ()))
        if torch.equal(row_format.decode(wrong, scales), row_format.decode(data, scales)):
            continue  # the sign of a zero
        assert not row_format.explains(wrong, scales, exact, exact).all(), place
    for place in range(min(scales.shape[1], 7)):
        wrong = scales.clone()
        wrong[0, place] ^= 0x40
        assert not row_format.explains(data, wrong, exact, exact).all(), place
