"""Engram's rows bit for bit, its gates within a derived bound of float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged import ALL_BACKENDS, a_device, skip_float64, use_backend
from torch import Tensor

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.device import TARGETS, has_triton
from anymla.ops.engram import engram_gate, engram_rows
from anymla.ops.engram.config import choose_rows_config
from anymla.ops.engram.shapes import V41_FLASH
from anymla.testing.conformance.expected import EngramGate
from anymla.testing.tolerance import assert_identical

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
no_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]
EPS = 1e-20


@pytest.fixture(autouse=True)
def forgotten_launches() -> Iterator[None]:
    """Launches are kept by shape, and tests change what a device is said to be."""
    yield
    if has_triton():
        from anymla.ops.engram import triton_gate, triton_rows

        triton_gate._gating.cache_clear()
        triton_rows._decoding.cache_clear()


def drawn(
    tokens: int, streams: int = 4, width: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """h, projected and weight."""
    h = torch.randn(tokens, streams, width, dtype=torch.float64)
    projected = torch.randn(tokens, (streams + 1) * width, dtype=torch.float64)
    return h.to(dtype), projected.to(dtype), 1 + 0.2 * torch.randn(streams, width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "streams", "width"),
    [(1, 4, 40), (3, 4, 1), (5, 1, 33), (7, 3, 1500), (17, 4, 64), (0, 4, 8)],
)
def test_gates_are_the_formula(
    backend: str, dtype: torch.dtype, tokens: int, streams: int, width: int
) -> None:
    skip_float64(backend, dtype)
    h, projected, weight = drawn(tokens, streams, width, dtype)
    got = engram_gate(h, projected, weight, eps=EPS, backend=backend)
    assert got.dtype == dtype
    assert got.is_contiguous()
    EngramGate.of(h, projected, weight, EPS).check(got, f"{dtype}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1e4])
def test_the_norms_take_sizes_away(backend: str, scale: float) -> None:
    """With V4.1's epsilon, which is too small to be seen but in rows of almost nothing."""
    h, projected, weight = drawn(6)
    for streams, parts in ((scale * h, projected), (h, scale * projected)):
        got = engram_gate(streams, parts, weight, eps=EPS, backend=backend)
        EngramGate.of(streams, parts, weight, EPS).check(got, f"{scale}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_nothing_to_agree_on_counts_as_a_little(backend: str, sign: float) -> None:
    """A dot of zero, of whatever sign its terms are, gives sigmoid(+0.001)."""
    h, projected, weight = drawn(4)
    h[:] = sign
    for weights in (weight, -weight):
        got = engram_gate(h, projected, weights, eps=EPS, backend=backend)
        value = projected[:, -40:].double().unsqueeze(1).expand(-1, 4, -1)
        want = torch.sigmoid(torch.tensor(1e-3, dtype=torch.float64)) * value
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_disagrees_is_added_less(backend: str) -> None:
    """Both sides of the least size, and of zero: keys that are streams, turned round, or hardly."""
    h, projected, weight = drawn(6)
    parts = projected.unflatten(1, (5, 40))
    for factor in (1.0, -1.0):
        parts[:, :4] = factor * h
        EngramGate.of(h, projected, weight, EPS).check(
            engram_gate(h, projected, weight, eps=EPS, backend=backend), f"keys {factor} h"
        )
    # Orthogonal but for a sixteenth of what is least, or sixteen times that.
    for size in (1e-6 / 16, 16e-6):
        for sign in (1.0, -1.0):
            h[:] = torch.tensor([1.0, 0.0]).repeat(20)
            parts[:, :4] = torch.tensor([sign * size, 1.0]).repeat(20)
            got = engram_gate(h, projected, torch.ones(4, 40), eps=EPS, backend=backend)
            EngramGate.of(h, projected, torch.ones(4, 40), EPS).check(got, f"{sign * size}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_stream(backend: str) -> None:
    h, projected, weight = drawn(3)
    h[1, 2, 5] = torch.nan
    projected[2, 3 * 40 + 1] = torch.nan  # key of the last stream
    clean = engram_gate(h.nan_to_num(), projected.nan_to_num(), weight, eps=EPS, backend=backend)
    got = engram_gate(h, projected, weight, eps=EPS, backend=backend)
    lost = torch.zeros(3, 4, dtype=torch.bool)
    lost[1, 2] = lost[2, 3] = True
    assert bool(got[lost].isnan().all())
    assert_identical(got[~lost], clean[~lost])


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_may_lie_anywhere(backend: str) -> None:
    """Before the first layer all streams are one."""
    h, projected, weight = drawn(5)
    for other in (
        h.repeat(1, 2, 1)[:, :4].repeat(2, 1, 1)[5:],
        h.transpose(1, 2).contiguous().transpose(1, 2),
        h[:, :1].expand(-1, 4, -1),
    ):
        got = engram_gate(other, projected, weight.T.contiguous().T, eps=EPS, backend=backend)
        EngramGate.of(other, projected, weight, EPS).check(got, f"strides {other.stride()}")
        if backend == "triton":  # torch's sums depend on where their terms lie
            same = engram_gate(other.contiguous(), projected, weight, eps=EPS, backend=backend)
            assert_identical(got, same)


@no_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_in_any_chunk(dtype: torch.dtype) -> None:
    """A prompt, ragged chunks of it, its tokens one by one."""
    h, projected, weight = drawn(19, width=48, dtype=dtype)
    whole = engram_gate(h, projected, weight, eps=EPS, backend="triton")
    for sizes in ([1, 5, 9, 4], [8, 8, 3], [1] * 19):
        parts = zip(h.split(sizes), projected.split(sizes), strict=True)
        got = [engram_gate(*part, weight, eps=EPS, backend="triton") for part in parts]
        assert_identical(torch.cat(got), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_form_keeps_its_bits(dtype: torch.dtype) -> None:
    """What V4.1's layers computed before there was an operation."""
    h, projected, weight = drawn(9, width=96, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    parts = projected.to(wide).unflatten(1, (5, 96))
    keys, value, state = parts[:, :4], parts[:, 4:], h.to(wide)
    dot = (state * weight * keys).sum(-1) * 96**-0.5
    for each in (state, keys):
        dot = dot * torch.rsqrt(each.square().mean(-1) + EPS)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    want = (state + gate.unsqueeze(-1) * value).to(dtype)
    assert_identical(engram_gate(h, projected, weight, eps=EPS), want)


@pytest.mark.parametrize("name", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_decoded_exactly(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """All codes with all scales that a dtype may hold, NaN and subnormals included."""
    backend = use_backend(name, monkeypatch)
    skip_float64(backend, dtype)
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 5, 1)
    scales = torch.randint(0, 256, (3, 5, 8)).to(torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 127, 254, 255, 120, 130, 103])
    out = torch.full((3, 5 * 256), 7.0, dtype=dtype)
    engram_rows(out, codes, scales, backend=backend)
    blocks = decode_ue8m0(scales).repeat_interleave(32, 2)
    want = (decode_e4m3(codes).float() * blocks).flatten(1).to(dtype)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ALL_BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "columns", "width", "blocks"),
    [(1, 24, 256, 8), (5, 3, 12, 4), (70, 1, 6, 6), (2, 4, 20, 1), (0, 2, 8, 2)],
)
def test_rows_of_any_size(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, columns: int, width: int, blocks: int
) -> None:
    backend = use_backend(name, monkeypatch)
    codes = torch.randint(0, 127, (tokens, columns, width)).to(torch.uint8)
    scales = torch.randint(110, 140, (tokens, columns, blocks)).to(torch.uint8)
    want = torch.empty(tokens, columns * width, dtype=torch.bfloat16)
    engram_rows(want, codes, scales, backend="reference")
    frame = torch.full((tokens, columns * width + 3), 7.0, dtype=torch.bfloat16)
    for out in (torch.empty_like(want), frame[:, 1:-2]):
        engram_rows(out, codes, scales, backend=backend)
        assert_identical(out.contiguous(), want)
    assert bool((frame[:, [0, -2, -1]] == 7).all())
    engram_rows(out := torch.empty_like(want), codes.mT.contiguous().mT, scales, backend=backend)
    assert_identical(out, want)


def test_wrong_calls_are_named() -> None:
    h, projected, weight = drawn(3)
    for call, message in (
        ((h[0], projected, weight), r"engram_gate: h must be .*\[T, N, D\]"),
        ((h, projected[:, 1:], weight), r"engram_gate: projected must be"),
        ((h, projected.double(), weight), r"engram_gate: projected must be"),
        ((h, projected, weight[:3]), r"engram_gate: weight must be"),
        ((h, projected, weight.bfloat16()), r"engram_gate: weight must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            engram_gate(*call, eps=EPS)
    codes, scales = (torch.zeros(2, 3, n, dtype=torch.uint8) for n in (8, 2))
    out = torch.zeros(2, 24)
    for call, message in (
        ((out, codes.char(), scales), "engram_rows: codes must be"),
        ((out[:1], codes, scales), "engram_rows: out must be"),
        ((out.int(), codes, scales), "engram_rows: out must be"),
        ((out, codes, scales[:, :2]), "engram_rows: scales must be"),
        ((out, codes, scales.repeat(1, 1, 2)[..., :3]), "S a divisor of W=8, got S=3"),
        ((out, codes, scales[..., :0]), "S a divisor of W=8, got S=0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            engram_rows(*call)


def test_tiles_of_rows_are_small_where_there_are_few() -> None:
    target, shape = TARGETS["sm_90"], V41_FLASH
    blocks = shape.columns * shape.width // shape.block
    few, many = (choose_rows_config(tokens * blocks, 32, target) for tokens in (1, 4096))
    assert (few.blocks, many.blocks) == (32, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 129, 4099])
def test_at_real_sizes_on_a_device(tokens: int) -> None:
    """V4.1-Flash's; a token's bits do not depend on how many there are."""
    shape, device = V41_FLASH, a_device()
    h, projected, weight = drawn(tokens, shape.streams, shape.hidden, torch.bfloat16)
    want = EngramGate.of(h, projected, weight, EPS)
    args = [each.to(device) for each in (h, projected, weight)]
    got = engram_gate(*args, eps=EPS, backend="triton")
    want.check(got.cpu(), f"{tokens} tokens")
    last = engram_gate(args[0][-1:], args[1][-1:], args[2], eps=EPS, backend="triton")
    assert_identical(last, got[-1:])
    codes = torch.randint(0, 256, (tokens, shape.columns, shape.width), device=device)
    scales = torch.randint(0, 256, (tokens, shape.columns, shape.width // shape.block))
    codes, scales = codes.to(torch.uint8), scales.to(torch.uint8).to(device)
    rows = torch.empty(2, tokens, shape.columns * shape.width, dtype=torch.bfloat16, device=device)
    for out, backend in zip(rows, ("triton", "torch"), strict=True):
        engram_rows(out, codes, scales, backend=backend)
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0, equal_nan=True)
