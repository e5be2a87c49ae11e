"""The Hopper kernel of attention during prefill: what it takes, and on a GPU what it computes."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from paged import a_device
from prefill_cases import Prefill, prefill

from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.ops.attention import (
    InverseRopeQuant,
    sparse_attention_rows,
)
from anymla.ops.attention import prefill_config as config
from anymla.ops.attention.decode_support import gluon_rows_support
from anymla.ops.device import TARGETS, target_of
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.registry import Support
from anymla.testing.tolerance import relative_l2

BACKEND = "gluon_sm90"


# What it takes ----------------------------------------------------------------------------------


def fake(dtype=torch.bfloat16, shape=(2, 64, 512)):
    return types.SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=shape, __len__=lambda: shape[0]
    )


class Rows:
    def __init__(self, count=5, dtype=torch.bfloat16):
        self.count = count
        self.dtype = dtype

    def __len__(self):
        return self.count


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(config, "runs_on", lambda device: Support(True))


def turning_by(channels):
    table = types.SimpleNamespace(shape=(9, channels), dtype=torch.float32)
    return InverseRopeQuant(None, table, 2)


@pytest.mark.usefixtures("hopper")
def test_what_it_takes():
    assert config.gluon_prefill_support(fake(), Rows())
    assert config.gluon_prefill_support(fake(torch.float16), Rows(dtype=torch.float16))
    assert config.gluon_prefill_support(fake(shape=(1, 1, 512)), Rows())
    assert config.gluon_prefill_support(fake(), Rows(), epilogue=turning_by(64))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("q", "rows", "reason"),
    [
        (fake(torch.float32), Rows(dtype=torch.float32), "float16"),
        (fake(), Rows(dtype=torch.float16), "both"),
        (fake(shape=(2, 64, 576)), Rows(), "512 channels, got 576"),
        (fake(), Rows(0), "at least one row"),
    ],
)
def test_what_it_leaves_to_others(q, rows, reason):
    refused = config.gluon_prefill_support(q, rows)
    assert not refused
    assert reason in refused.reason


@pytest.mark.usefixtures("hopper")
def test_angles_that_it_does_not_turn_by():
    assert not config.gluon_prefill_support(fake(), Rows(), epilogue=turning_by(32))


@pytest.mark.usefixtures("hopper")
def test_scales_that_it_does_not_take():
    for scale in (0.0, -1.0, 1e30):
        for epilogue in (None, turning_by(64)):
            refused = config.gluon_prefill_support(fake(), Rows(), scale=scale, epilogue=epilogue)
            assert not refused


def test_other_machines(monkeypatch):
    monkeypatch.setattr(config, "triton_support", lambda q: Support(True))
    monkeypatch.setattr(config, "target_of", lambda device: TARGETS["sm_100"])
    config.runs_on.cache_clear()
    try:
        assert "Hopper" in config.runs_on(torch.device("cpu")).reason
    finally:
        config.runs_on.cache_clear()


def test_decoded_rows_need_a_gpu():
    q, kv = torch.randn(2, 3, 512).bfloat16(), torch.randn(5, 512).bfloat16()
    refused = gluon_rows_support(q, kv, torch.zeros(2, 4, dtype=torch.int32))
    assert not refused
    assert "9.0" in refused.reason


# What it computes -------------------------------------------------------------------------------


@pytest.fixture
def device():
    return str(a_device())


def check(case: Prefill, out: torch.Tensor, lse: torch.Tensor) -> None:
    want, want_lse = case.expected()
    error = relative_l2(out, want)
    # One rounding of the weights and one of the output, 2^-9 or 2^-12 each at most.
    assert error < (3.2e-3 if out.dtype == torch.bfloat16 else 4e-4)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
@pytest.mark.parametrize("heads", [1, 16, 33, 64, 100, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_runs_and_lists(device, listed, heads, dtype):
    case = prefill(
        heads, tokens=150, heads=heads, dtype=dtype, listed=listed, entries=700, device=device
    )
    first = case.run(BACKEND)
    check(case, *first)
    again = case.run(BACKEND)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_less_than_a_tile(device, listed):
    case = prefill(
        1, tokens=3, heads=5, dtype=torch.float16, listed=listed, entries=30, rows=20, window=16,
        device=device,
    )  # fmt: skip
    check(case, *case.run(BACKEND))


@pytest.mark.gpu("sm_90")
def test_every_block_count(device):
    case = prefill(
        1, tokens=300, heads=64, dtype=torch.float16, listed=False, entries=34 * 64,
        rows=5000, device=device,
    )  # fmt: skip
    check(case, *case.run(BACKEND))


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("sm_count", [1, 7, 131, 264])
def test_any_number_of_sms(device, sm_count, monkeypatch):
    from anymla.ops.attention import gluon_sm90_prefill_launch as gluon_sm90_launch

    known = dataclasses.replace(target_of(torch.device(device)), sm_count=sm_count)
    monkeypatch.setattr(gluon_sm90_launch, "target_of", lambda device: known)
    case = prefill(
        sm_count, tokens=60, heads=64, dtype=torch.float16, listed=True, entries=900, device=device
    )
    check(case, *case.run(BACKEND))


@pytest.mark.gpu("sm_90")
def test_a_graph_is_replayed_with_other_lengths(device):
    """And with other rows: nothing but addresses is recorded."""
    cases = [
        prefill(
            n, tokens=100, heads=64, dtype=torch.float16, listed=True, entries=500, device=device
        )
        for n in range(3)
    ]
    held = cases[0]
    held.run(BACKEND)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = held.run(BACKEND)
    for case in cases:
        for name in ("q", "rows", "ranges", "lists", "sink"):
            getattr(held, name).copy_(getattr(case, name))
        graph.replay()
        torch.cuda.synchronize()
        check(case, out, lse)


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [24, 64, 128])
def test_rotated_and_quantised(device, heads):
    case = prefill(
        heads, tokens=80, heads=heads, dtype=torch.float16, listed=True, entries=300, device=device
    )
    angles = torch.randn(300, 32, device=device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 300, (80,), device=device)
    codes, scales = case.run(BACKEND, epilogue=InverseRopeQuant(positions, table, 8))
    want, want_scales = inverse_rope_fp8_quant(
        case.expected()[0].float(), positions, table, n_groups=8, backend="reference"
    )
    got, exact = (
        dequantize_fp8_rows(each.view(torch.uint8), factor, torch.float32)
        for each, factor in ((codes, scales), (want, want_scales))
    )
    # Weights that are rounded to float16 move a value over the edge of a code now and then.
    assert relative_l2(got, exact) < 1e-2
    assert float((codes.view(torch.uint8) == want.view(torch.uint8)).float().mean()) > 0.97


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [20, 64, 128])
@pytest.mark.parametrize("ragged", [False, True])
def test_listed_rows_of_one_tensor(device, heads, ragged):
    tokens, width, rows = 90, 500, 700
    q = torch.randn(tokens, heads, 512).to(torch.float16).to(device)
    kv = torch.randn(rows, 1, 512).to(torch.float16).to(device)
    indices = torch.randint(-30, rows + 30, (tokens, 1, width)).int().to(device)
    lengths = torch.randint(-1, width + 2, (tokens,)).clamp(0, width).int().to(device)
    lengths[3] = 0
    lengths = lengths if ragged else None
    sink = torch.randn(heads, device=device)
    peaks = torch.empty(tokens, heads, device=device)
    keywords = {"sink": sink, "empty_lse": torch.inf}
    out, lse = sparse_attention_rows(
        q, kv, indices, lengths, **keywords, max_logits=peaks, backend=BACKEND
    )
    want_peaks = torch.empty(tokens, heads, dtype=torch.float64, device=device)
    want, want_lse = sparse_attention_rows(
        q.double(), kv.double(), indices, lengths, **keywords, max_logits=want_peaks,
        backend="reference",
    )  # fmt: skip
    assert relative_l2(out, want) < 4e-4
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(peaks.double(), want_peaks, atol=1e-3, rtol=1e-4)
