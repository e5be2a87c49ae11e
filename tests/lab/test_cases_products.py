"""The cases of linear layers, of experts and of single kernels, made small."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from small_shapes import LAYER, experts_of

from anymla.bench import gpu, kernels
from anymla.bench.kernels import TimedCall
from anymla.bench.runner import run
from anymla.ops.linear import fp8_block_linear
from anymla.ops.moe.shapes import ExpertsShape
from lab.cases import linear, moe


def test_products_with_and_without_hoppers_kernels(monkeypatch, scripted, recorded_fields):
    monkeypatch.setattr(linear, "MODELS", {"flash": LAYER})
    monkeypatch.setattr(linear, "copies_for", lambda _: 2)
    clock = scripted(30, 60)
    results = list(run(linear.cases(["flash"], [1, 3]), clock))
    names = [result.case for result in results]
    assert names[0] == "flash, 6 products of a layer, 1 tokens"
    assert names[1] == "flash wq_a, wkv 256 x 256, 1 tokens"
    assert names[-1] == "flash compressors 776 x 256 bfloat16, 3 tokens"
    assert len(names) == len(set(names)) == 2 * (1 + 6 + 1)
    first = results[0].values
    # Three layers are one call.
    assert (first["us"], first["others_us"]) == (10.0, 20.0)
    read = sum(shape.elements for shape in LAYER.products())
    assert first["bytes_us"] == round(read / 4e6, 1)
    assert first["share_of_copy"] == round(read / 4e6 / 10, 3)
    for result in results:
        assert set(result.values) == recorded_fields("linear_h200", result.part)
    assert clock.seen[:3] == [(1, 20), (1, 20), "release"]


def test_products_of_v41_quantise_their_activations(monkeypatch, scripted):
    small = dataclasses.replace(LAYER, quant_block=32)
    monkeypatch.setattr(linear, "V41_MODELS", {"flash-41": small})
    monkeypatch.setattr(linear, "copies_for", lambda _: 2)
    results = list(run(linear.cases(["flash-41"], [2]), scripted(30, 60)))
    assert results[0].case == "flash-41, 5 products of a layer, 2 tokens"
    assert len(results) == 1 + 5


def test_what_is_besides_hopper_is_all_but_hopper():
    assert "gluon_sm90" in fp8_block_linear.backends
    with linear._without_hopper():
        assert "gluon_sm90" not in fp8_block_linear.backends
    assert "gluon_sm90" in fp8_block_linear.backends


def test_experts_against_the_bytes_of_those_that_are_visited(monkeypatch, clock, recorded_fields):
    monkeypatch.setattr(moe, "MODELS", {"pro": experts_of})
    cases = list(moe.cases(["pro"], 6, [1, 5]))
    one, five = run(cases, clock)
    assert one.case == "pro experts, mxfp4, 6 of them, 1 tokens"
    assert one.values["visited_experts"] == 2
    assert 2 < five.values["visited_experts"] <= 6
    assert set(one.values) == recorded_fields("experts_h200", "experts")
    moved = 2 * (3 * 128 * 256) * (1 / 2 + 1 / 32)
    assert one.values["bytes_us"] == round(moved / 4e6, 1)
    assert one.values["tflops"] == round(2 * 2 * 3 * 128 * 256 / 10e6, 1)
    assert one.values["kernels_us"] == {"decode_kernel": 3.0, "nvjet": 2.5}


def test_experts_by_a_backend_that_is_named(monkeypatch, scripted):
    monkeypatch.setattr(moe, "MODELS", {"pro": experts_of})
    (row,) = run(moe.cases(["pro"], 6, [5], ["torch", "reference"]), scripted(40, 20, 80))
    values = row.values
    assert (values["us"], values["torch_us"], values["reference_us"]) == (40.0, 20.0, 80.0)
    assert values["torch_tflops"] == round(2 * 5 * 2 * 3 * 128 * 256 / 20e6, 1)
    assert values["torch_distance"] < 1e-2
    assert values["reference_distance"] < 1e-2


def test_experts_in_blocks_that_are_named(monkeypatch, scripted):
    seen = []

    def gemms(multiply, **alignments):
        return multiply, alignments

    def run_experts(choose, x, ids, weights, **given):
        multiply, alignments = choose()
        seen.append((alignments, given))
        multiply(types.SimpleNamespace(shape=ExpertsShape(5, 2, 6, 512, 512), quant_block=128), x)
        return x

    launch = types.SimpleNamespace(
        Gemms=gemms,
        run_experts=run_experts,
        grouped_gemm=lambda inputs, out, config: seen.append(config),
    )
    monkeypatch.setattr(moe, "MODELS", {"pro": experts_of})
    monkeypatch.setattr(moe.importlib, "import_module", lambda name: launch)
    (row,) = run(moe.cases(["pro"], 6, [5], blocks=[32, 64]), scripted(40, 20, 80))
    assert (row.values["us"], row.values["w4a8_32_us"], row.values["w4a8_64_us"]) == (40, 20, 80)
    assert row.values["w4a8_64_tflops"] == round(2 * 5 * 2 * 3 * 128 * 256 / 80e6, 1)
    assert {config.block_m for config in seen[1::2]} == {32, 64}
    alignments, given = seen[0]
    assert alignments == {"weight_alignment": 16, "scale_alignment": 16}
    assert [len(given[name]) for name in ("w1", "w3", "w2", "s1", "s3", "s2")] == [6] * 6
    assert given["weight_format"] == "mxfp4"


@pytest.fixture
def single(monkeypatch):
    """A family of cases with everything that may be said of one."""

    def setup():
        x = torch.ones(3)
        return lambda: x + 1

    def fails():
        raise RuntimeError("no memory")

    def cases():
        yield TimedCall("plain", setup, 4_000_000, 8_000_000)
        yield TimedCall("share", setup, 20_000_000, beside_copy=True)
        yield TimedCall("broken", fails, 4)

    module = types.SimpleNamespace(cases=cases)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: module)
    assert kernels.__name__ == "anymla.bench.kernels"


@pytest.mark.usefixtures("single")
def test_single_kernels_against_the_devices_ceilings(clock):
    found = list(run(gpu.cases(["cache"]), clock, failures_are_rows=True))
    plain, share, broken = found
    assert {result.part for result in found} == {"cache"}
    assert plain.values == {
        "seed": 0, "us": 10.0, "gb_per_s": 400.0, "share_of_copy": 0.1, "tflops": 0.8,
        "share_of_product": 0.001,
    }  # fmt: skip
    assert plain.target is None
    assert share.values["copy_us"] == 20.0
    assert share.values["share_of_same_copy"] == 2.0
    assert share.target is None
    assert broken.values == {"error": "RuntimeError: no memory"}
    assert (broken.target, broken.met) == ("runs", False)


def test_families_of_single_kernels():
    assert gpu.families() == ["attention", "cache", "decoder", "engram", "indexer", "layer"]
