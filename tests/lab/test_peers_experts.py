"""Peers of the experts: their layouts hold what they were given, and what is wrong is not timed."""

from __future__ import annotations

import types

import pytest
import torch
from small_shapes import experts_of

from anymla.bench.runner import run
from anymla.ops.moe import experts
from anymla.testing.tolerance import relative_l2
from lab.cases import moe
from lab.peers import marlin
from lab.peers.experts import BFLOAT16_BOUND, E4M3_BOUND, ExpertsPeer
from lab.peers.humming import Humming, chosen_config
from lab.peers.marlin import Marlin
from lab.peers.triton_kernels import TritonKernels, alternating


class Exact(ExpertsPeer):
    """The reference in place of a library, its results times a factor."""

    name, title, modules = "exact", "the reference", ("torch",)
    bound, note = BFLOAT16_BOUND, "the reference itself"
    factor, quantize, made = 1.0, False, 0

    def prepare(self, weights, limit):
        """Calls of the reference."""
        self.made += 1
        options = {"weight_format": "mxfp4", "swiglu_limit": limit, "backend": "reference"}

        def call(x, ids, routing):
            got = experts(x, ids, routing, **weights, **options, quantize_activations=self.quantize)
            return self.factor * got

        return call


def rows_of(clock, *peers, tokens=(5,)):
    return [result.values for result in run(moe.cases(["pro"], 6, tokens, (), peers), clock)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(moe, "MODELS", {"pro": experts_of})


def test_a_peer_is_prepared_once_and_timed_after_it_was_found_right(scripted):
    peer = Exact()
    one, five = rows_of(scripted(40, 20, 40, 30), peer, tokens=(1, 5))
    assert (one["us"], one["exact_us"], five["exact_us"]) == (40.0, 20.0, 30.0)
    assert peer.made == 1
    assert one["exact_error"] == 0.0
    assert one["exact_note"] == peer.note
    assert five["exact_tflops"] == round(2 * 5 * 2 * 3 * 128 * 256 / 30e6, 1)


@pytest.mark.parametrize("factor", [1.01, 0.0, float("nan")])
def test_a_peer_that_is_wrong_has_no_time_but_a_reason(clock, factor):
    peer = Exact()
    peer.factor = factor
    (row,) = rows_of(clock, peer)
    assert "exact_us" not in row
    assert "off the reference, more than 0.008" in row["exact_absent"]
    assert row["us"] == 10.0


def test_bounds_tell_the_formats_of_activations_apart(clock):
    """Rounding activations to e4m3 is beyond one bound and within the other."""
    peer = Exact()
    peer.quantize = True
    (row,) = rows_of(clock, peer)
    assert "exact_us" not in row
    peer = Exact()
    peer.quantize, peer.bound = True, E4M3_BOUND
    (row,) = rows_of(clock, peer)
    assert BFLOAT16_BOUND < row["exact_error"] < E4M3_BOUND


def test_the_bound_leaves_room_for_ten_roundings_and_not_for_twenty_five():
    x = torch.randn(1 << 16).double()
    rounding = relative_l2(x.bfloat16(), x)
    assert 10**0.5 * rounding < BFLOAT16_BOUND < 25**0.5 * rounding


def test_a_peer_that_is_not_here_or_raises_is_named_with_the_reason(clock):
    def fails(name):
        raise ImportError(f"No module named {name!r}")

    class Raises(Exact):
        name = "raises"

        def prepare(self, weights, limit):
            raise RuntimeError("out of memory\nand more")

    class RaisesLater(Exact):
        name = "later"

        def prepare(self, weights, limit):
            return lambda *_: 1 / 0

    vllm = Marlin(find=fails)
    peers = [vllm, TritonKernels(fails), Humming(vllm, find=fails), Raises(), RaisesLater()]
    (row,) = rows_of(clock, *peers)
    assert "vllm._moe_C_stable_libtorch: No module" in row["marlin_absent"]
    assert "triton_kernels.matmul_ogs: No module" in row["triton_kernels_absent"]
    assert "humming.layer: No module" in row["humming_absent"]
    assert row["raises_absent"] == "RuntimeError: out of memory"
    assert row["later_absent"].startswith("ZeroDivisionError: ")


def test_humming_needs_the_kernel_that_orders_pairs():
    def fails(name):
        raise ImportError(name)

    humming = Humming(Marlin(find=fails), find=lambda name: types.ModuleType(name))
    assert "vLLM's Marlin cannot be imported" in humming.available().reason
    assert Humming(Marlin(find=fails), channels=0).name == "humming_token"


def test_a_shard_of_each_expert_is_narrower(clock):
    case = next(iter(moe.cases(["pro"], 6, [5], (), (), tensor_parallel=2)))
    assert case.label == "pro experts, mxfp4, 6 of them, 1/2 of each, 5 tokens"
    (result,) = run([case], clock)
    assert result.values["tflops"] == round(2 * 5 * 2 * 3 * 64 * 256 / 10e6, 1)


def unpack_codes(packed):
    """Invert ``pack_codes``."""
    tile = marlin._TILE
    n, k = packed.shape[1] // 2, tile * packed.shape[0]
    bytes_ = packed.contiguous().view(torch.uint8)
    order = marlin._code_order(packed.device)
    words = torch.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(-1, len(order))
    tiles = torch.empty_like(words)
    tiles[:, order] = words
    tiles = tiles.view(k // marlin._TILE, n // marlin._TILE, marlin._TILE, marlin._TILE).transpose(
        1, 2
    )
    values = tiles.reshape(k, n).T.reshape(n, k // 2, 2)
    return values[..., 0] | values[..., 1] << 4


def unpack_scales(packed):
    """Invert ``pack_scales``."""
    steps = packed.contiguous().view(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]]
    return steps.reshape(-1, 8, 8).transpose(1, 2).reshape(packed.shape).T


def test_marlin_codes_come_back_and_are_where_its_threads_look():
    codes = torch.randint(0, 256, (128, 96), dtype=torch.uint8)
    packed = marlin.pack_codes(codes)
    assert packed.shape == (192 // 16, 2 * 128)
    assert torch.equal(unpack_codes(packed), codes)
    # Thread 5 of a tile has column 1 and rows 2, 3, 10, 11, then column 9: its int32 for the second
    # of four tiles (rows 16 to 31 of the weight).
    values = torch.stack((codes & 15, codes >> 4), -1).view(128, 192)
    word = int(packed[3, 4 * 5 + 1])
    held = [word >> 4 * i & 15 for i in range(8)]
    k = [48 + row for row in (2, 10, 2, 10, 3, 11, 3, 11)]
    n = [16 + column for column in (1, 1, 9, 9, 1, 1, 9, 9)]
    assert held == values[n, k].tolist()


def test_marlin_scales_come_back_in_its_order():
    scales = torch.arange(64, dtype=torch.uint8)[:, None] + torch.tensor([[0, 64]]).byte()
    packed = marlin.pack_scales(scales)
    assert packed.dtype == torch.float8_e8m0fnu
    assert packed.view(torch.uint8)[0, :8].tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
    assert torch.equal(unpack_scales(packed), scales)
    drawn = torch.randint(100, 130, (192, 6), dtype=torch.uint8)
    assert torch.equal(unpack_scales(marlin.pack_scales(drawn)), drawn)


def test_marlin_takes_the_smallest_block_that_most_experts_fill():
    pairs = [(1, 8), (7.1, 8), (7.3, 16), (24, 32), (43, 48), (44, 64), (1000, 64)]
    assert [marlin.block_rows(given) for given, _ in pairs] == [rows for _, rows in pairs]


def test_alternating_rows_of_gate_and_up():
    both = torch.arange(8).view(1, 8, 1)
    assert alternating(both).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_humming_settings_of_an_interval():
    intervals = [(0, 8, {"a": 1}), (8, 1 << 30, {"a": 2})]
    assert chosen_config(intervals, 8) == {"a": 1}
    assert chosen_config(intervals, 9) == {"a": 2}
    with pytest.raises(ValueError, match="no settings for 0 rows"):
        chosen_config(intervals, 0)
