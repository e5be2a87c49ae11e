"""Entries that are neither rotated nor stored, of every kind of window, against the reference."""

import pytest
import torch
from paged import DEVICE_BACKENDS, a_device, use_backend, use_device_backend, without_waiting

from anymla.formats.state_layout import allocate_states
from anymla.ops.compressor import compress_norm
from anymla.testing.tolerance import accumulation, assert_close

BACKENDS = ("torch", "torch without looking at values", "triton", "triton as on Arc A")
EPS = 1e-20  # V4.1's
OUTSIDE = (-1, -(2**31), 2**31 - 1)


def a_call(tokens, ratio, overlap, channels, page_size=8, requests=3, pages=40):
    """Arguments: tables with pages that are not there, states of which some are not stored."""
    random = torch.Generator().manual_seed(tokens + ratio)
    width = (2 if overlap else 1) * channels
    states = allocate_states(pages, page_size, width, "cpu")
    states.copy_(torch.randn(states.shape, generator=random))
    columns = pages // requests
    table = torch.randperm(pages, generator=random)[: requests * columns].int()
    table = table.reshape(requests, columns)
    table[0, 1], table[1, 0] = -1, pages
    positions = torch.randint(0, columns * page_size, (tokens,), generator=random)
    positions[::2] = positions[::2] // ratio * ratio + ratio - 1
    owners = torch.randint(0, requests, (tokens,), generator=random).int()
    slots = torch.arange(tokens) % (pages * page_size)
    if tokens > 4:
        owners[1], owners[3] = OUTSIDE[0], OUTSIDE[2]
        slots[2], slots[4] = OUTSIDE[1], pages * page_size
        positions[0] = -1
    weight = torch.rand(channels, generator=random) + 0.5
    how = {"compress_ratio": ratio, "overlap": overlap}
    return (states, table, slots, owners, positions, weight, EPS), how


KINDS = [(2, False, 64), (4, True, 32), (1, False, 128), (40, False, 32)]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("ratio", "overlap", "channels"), KINDS)
@pytest.mark.parametrize("tokens", [1, 21])
def test_backends_agree_with_the_reference(kind, ratio, overlap, channels, tokens, monkeypatch):
    backend = use_backend(kind, monkeypatch)
    given, how = a_call(tokens, ratio, overlap, channels)
    want = compress_norm(*given, **how, backend="reference")
    got = compress_norm(*given, **how, backend=backend)
    check(got, want, 2 * ratio + channels)
    assert want.any()
    assert tokens == 1 or (want == 0).all(1).any()


def check(got, want, terms):
    """Sums of a window and of a row, of values around one, in another order."""
    assert got.dtype == want.dtype == torch.float32
    error = accumulation(terms, torch.float32, c=4.0)
    assert_close(got, want, atol=error, rtol=error, name="entries")
    assert torch.equal((got == 0).all(1), (want == 0).all(1))


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_window_of_nan_is_of_its_token_alone(kind, monkeypatch):
    backend = use_backend(kind, monkeypatch)
    given, how = a_call(9, 2, False, 32)
    want = compress_norm(*given, **how, backend="reference")
    row = int((want != 0).any(1).nonzero()[0])
    page = given[1][given[3][row].long(), given[4][row] // 8]
    given[0][page.long()] = torch.nan
    got = compress_norm(*given, **how, backend=backend)
    again = compress_norm(*given, **how, backend="reference")
    assert bool(got[row].isnan().all())
    assert torch.equal(got.isnan(), again.isnan())


@pytest.mark.parametrize("kind", BACKENDS)
def test_nothing_to_do(kind, monkeypatch):
    backend = use_backend(kind, monkeypatch)
    given, how = a_call(5, 2, False, 32)
    for of_none in (
        (given[0], given[1], *(each[:0] for each in given[2:5]), *given[5:]),
        (given[0], given[1][:, :0], *given[2:]),
        (given[0][:0], *given[1:]),
    ):
        got = compress_norm(*of_none, **how, backend=backend)
        assert got.shape == (len(of_none[4]), 32)
        assert not got.any()


def test_triton_takes_powers_of_two(monkeypatch):
    use_backend("triton", monkeypatch)
    given, how = a_call(5, 2, False, 48)
    assert "power of two" in compress_norm.supports(*given, **how, backend="triton").reason


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DEVICE_BACKENDS)
@pytest.mark.parametrize(("ratio", "overlap", "channels"), [(2, False, 512), (4, True, 512)])
def test_a_device_gives_what_a_cpu_does_without_waiting(
    kind, ratio, overlap, channels, monkeypatch
):
    backend, device = use_device_backend(kind, monkeypatch), a_device()
    given, how = a_call(300, ratio, overlap, channels)
    want = compress_norm(*given, **how, backend="reference")
    # Pages of states lie apart, and a copy would close the gaps.
    states = allocate_states(len(given[0]), given[0].shape[1], given[0].shape[2] // 2, device)
    states.copy_(given[0])
    there = (each.to(device) if isinstance(each, torch.Tensor) else each for each in given[1:])
    moved = (states, *there)
    torch.cuda.synchronize()
    with without_waiting(device):
        got = compress_norm(*moved, **how, backend=backend)
    check(got.cpu(), want, 2 * ratio + channels)
