"""The commands of GPU benchmarks from end to end, on the fake clock and made small."""

from __future__ import annotations

import functools
import json
import types

import pytest
import small_shapes
import torch
from click.testing import CliRunner

from anymla.bench.layer_setup import LayerSetup
from anymla.bench.report import Result
from anymla.bench.runner import Case, Subject
from anymla.cli.bench_rows import LAB
from anymla.cli.main import main as anymla
from anymla.compat import flash_mla
from anymla.layers.side_stream import INLINE
from lab import layer
from lab.__main__ import main
from lab.cases import (
    ampere_attention,
    linear,
    moe,
    prefill_attention,
    sparse_attention,
    v41_attention,
)
from lab.cases.prefill_attention import ListedRows, PrefillCase
from lab.cases.sparse_attention import Decode, Drawn
from lab.peers.ampere import AmpereEngine


@pytest.fixture(autouse=True)
def device(monkeypatch, clock):
    """A GPU that is the fake clock's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("anymla.bench.gpu.device_facts", lambda: {"device": "a GPU"})
    monkeypatch.setattr("anymla.bench.gpu_timing.GraphClock", lambda: clock)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs a command; its rows, and what it printed."""

    def run(words: str, code: int = 0):
        file = tmp_path / "rows.jsonl"
        arguments = [*words.split(), "--json", str(file)]
        program = (anymla, "anymla bench") if arguments[0] == "run" else (main, LAB)
        if program[0] is anymla:
            arguments = ["bench", *arguments]
        monkeypatch.setattr("sys.argv", [program[1], *arguments])
        done = CliRunner().invoke(program[0], arguments, prog_name=program[1])
        assert done.exit_code == code, (done.output, done.exception)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert {row["command"] for row in rows} == {f"{program[1]} {words}"}
        assert {row["device"] for row in rows} == {"a GPU"}
        return rows, done.stdout

    return run


@pytest.fixture
def peer(monkeypatch):
    """This package's FlashMLA in FlashMLA's place."""
    monkeypatch.setattr("lab.peers.Peer._found", (flash_mla, ""))
    monkeypatch.setattr(flash_mla, "__version__", "1.0", raising=False)


@pytest.fixture
def small(monkeypatch):
    for name in ("_WINDOW_SLOTS", "_EXTRA_SLOTS"):
        monkeypatch.setattr(sparse_attention, name, 512)
    monkeypatch.setattr(sparse_attention, "_MOST_LISTS", 2)
    for name in ("shapes", "fp8_heads_shapes"):
        two = [Decode(1, 1, heads, 64) for heads in (8, 64)]
        monkeypatch.setattr(sparse_attention, name, lambda two=two: two)
    v32 = [Decode(1, 2, 2, 0, lengths=False, width=64, v32=True)]
    monkeypatch.setattr(sparse_attention, "v32_shapes", lambda: v32)
    v41 = [Decode(1, 1, 2, extra) for extra in (64, 0)]
    monkeypatch.setattr(v41_attention, "shapes", lambda: v41)


@pytest.mark.usefixtures("small", "peer")
@pytest.mark.parametrize(
    ("words", "part", "count"),
    [
        ("--flash-mla", sparse_attention.PART, 2),
        ("--flash-mla --planned --heads 64", sparse_attention.PART, 1),
        ("--flash-mla --v32", sparse_attention.V32, 1),
        ("--flash-mla --fused-end --heads 64", sparse_attention.FP8_HEADS, 1),
    ],
)
def test_attention(bench, words, part, count):
    # Eight heads are to be faster than FlashMLA, with which they are level here.
    rows, said = bench(f"attention --backend torch {words}", 1 if count == 2 else 0)
    assert {row["part"] for row in rows} == {part}
    assert len(rows) == count
    for row in rows:
        assert (row["backend"], row["flash_mla"], row["ratio"]) == ("torch", "1.0", 1.0)
    assert part in said
    assert "ragged" not in said
    assert "seed" not in said


class Engine(AmpereEngine):
    """An engine whose decode is this package's."""

    name, title, cached = "engine", "an engine", "bfloat16"

    def __init__(self, *, here: bool) -> None:
        super().__init__()
        self._found = (types.SimpleNamespace(), "") if here else (None, "not here")

    def version(self):
        return "1.0"

    def decode(self, inputs):
        return inputs.attention("torch")


@pytest.mark.usefixtures("small")
def test_attention_beside_the_engines_for_ampere_that_are_here(bench, monkeypatch):
    """Their kernels are compiled first; a row has all times, and how far the fastest is behind."""
    compiled = []
    engine = Engine(here=True)
    monkeypatch.setattr("lab.peers.ampere.ampere_engines", lambda: [Engine(here=False), engine])
    monkeypatch.setattr(ampere_attention, "shapes", lambda: [*sparse_attention.shapes()])
    monkeypatch.setattr(ampere_attention, "compile_ahead", lambda *given: compiled.append(given))
    cases = functools.partial(ampere_attention.ampere_cases, backend="torch")
    monkeypatch.setattr(ampere_attention, "ampere_cases", cases)
    # Level with the engine, which is a target that is missed.
    ((row,), said) = bench("attention --ampere --heads 64", 1)
    assert compiled == [([Decode(1, 1, 64, 64)], [engine], torch.device("cuda"))]
    assert (row["part"], row["engine"], row["engine_rows"]) == (
        ampere_attention.PART, "1.0", "bfloat16",
    )  # fmt: skip
    assert [row[f"{name}us"] for name in ("", "bf16_", "engine_")] == [10.0] * 3
    assert (row["ratio"], row["met"]) == (1.0, False)
    assert ampere_attention.PART in said


@pytest.mark.usefixtures("small", "peer")
def test_random_shapes_of_several_seeds_in_turn(bench, monkeypatch):
    monkeypatch.setattr(
        sparse_attention,
        "random_shapes",
        lambda count, seed: (
            Drawn(1, 1, 8 + number, 64, draw=seed, number=number) for number in range(count)
        ),
    )
    monkeypatch.setattr(sparse_attention, "compile_ahead", lambda *_, **__: None)
    words = "attention --backend torch --random 2 --seed 5 --seed 6 --planned --flash-mla"
    rows, _ = bench(words)
    assert [(row["draw"], row["number"]) for row in rows] == [(5, 0), (6, 0), (5, 1), (6, 1)]


@pytest.mark.usefixtures("small", "peer")
def test_no_shape_begins_later_than_asked(bench, monkeypatch):
    begun = []

    def some(cases, end):
        begun.append(end)
        yield next(iter(cases))

    monkeypatch.setattr("lab.timing.begun_within", some)
    monkeypatch.setattr("lab.cli.attention.time.monotonic", lambda: 100.0)
    rows, _ = bench("attention --backend torch --seconds 30")
    assert begun == [130.0]
    assert len(rows) == 1


@pytest.mark.usefixtures("small")
def test_rows_of_v41(bench):
    rows, said = bench("attention --backend torch --v41")
    assert [row["extra"] for row in rows] == [64, 0]
    for row in rows:
        assert row["ratio"] == 1.0
        for kind in ("v4", "fp8", "nvfp4", "portable"):
            assert row[f"{kind}_us"] == 10.0
            assert row[f"{kind}_error"] < 4e-3
    assert v41_attention.PART in said


@pytest.mark.usefixtures("peer")
def test_prefill(bench, monkeypatch):
    monkeypatch.setattr(prefill_attention, "SHAPES", (PrefillCase("window", 9, 3, 300),))
    monkeypatch.setattr(prefill_attention, "LONG_SHAPES", (PrefillCase("all", 12, 3, 300),))
    monkeypatch.setattr(prefill_attention, "PIPELINES", (PrefillCase("window", 9, 64, 300),))
    monkeypatch.setattr(prefill_attention, "LISTED", (ListedRows(6, 64, 128, 500),))
    # Every one is to be faster than the peer.
    rows, _ = bench("prefill --backend torch --long --flash-mla", 1)
    assert [row["part"] for row in rows] == [
        "attention during prefill", "attention during prefill",
        "prefill from FP8 pages to bf16 heads", "prefill from FP8 pages to fp8 heads",
        "flash_mla_sparse_fwd",
    ]  # fmt: skip
    assert {row["ratio"] for row in rows} == {1.0}


@pytest.mark.usefixtures("peer")
def test_prefill_of_one_shape_a_kind(bench, monkeypatch):
    monkeypatch.setattr(prefill_attention, "KINDS", (PrefillCase("window", 9, 3, 300),))
    monkeypatch.setattr(prefill_attention, "LISTED_KINDS", (ListedRows(6, 64, 128, 500),))
    rows, _ = bench("prefill --backend torch --kinds --flash-mla", 1)
    assert [row["part"] for row in rows] == ["attention during prefill", "flash_mla_sparse_fwd"]


def test_linear(bench, monkeypatch):
    monkeypatch.setattr(linear, "MODELS", dict.fromkeys(("flash", "pro"), small_shapes.LAYER))
    monkeypatch.setattr(linear, "copies_for", lambda _: 2)
    rows, _ = bench("linear --model pro --tokens 2")
    assert [row["part"] for row in rows] == ["device", "layer", *["product"] * 7]


def test_experts(bench, monkeypatch):
    monkeypatch.setattr(moe, "MODELS", {"flash": small_shapes.experts_of})
    rows, said = bench("experts --experts 6 --tokens 2 --tokens 3")
    assert [row["case"] for row in rows] == [
        "copy", "bf16 product 8192^3", "flash experts, mxfp4, 6 of them, 2 tokens",
        "flash experts, mxfp4, 6 of them, 3 tokens",
    ]  # fmt: skip
    assert "kernels_us" in rows[-1]
    assert "kernels_us" not in said


@pytest.mark.parametrize("asked", ["all", "marlin"])
def test_experts_next_to_libraries_that_are_not_here(bench, monkeypatch, asked):
    monkeypatch.setattr(moe, "MODELS", {"flash": small_shapes.experts_of})
    monkeypatch.setattr("lab.peers.Peer._found", (None, "no"))
    rows, said = bench(f"experts --experts 6 --tokens 2 --tensor-parallel 2 --peer {asked}")
    assert rows[-1]["case"] == "flash experts, mxfp4, 6 of them, 1/2 of each, 2 tokens"
    titles = {"marlin": "vLLM's Marlin"}
    if asked == "all":
        titles |= {
            "triton_kernels": "triton_kernels",
            "humming": "Humming",
            "humming_token": "Humming, a scale a token",
        }
    reasons = {
        f"{name}_absent": f"{title} cannot be imported (no)" for name, title in titles.items()
    }
    assert {k: v for k, v in rows[-1].items() if k.endswith("_absent")} == reasons
    assert not [field for field in rows[-1] if field.removesuffix("_us") in titles]
    assert "vLLM's Marlin cannot be imported" in said


def test_single_kernels_go_on_after_one_that_fails(bench, monkeypatch):
    def fails(_):
        raise RuntimeError("no memory")

    def cases(_):
        yield Case("cache", "broken", fails)
        yield Case("cache", "good", lambda _: [Subject("us", [lambda: None])])

    monkeypatch.setattr("anymla.bench.gpu.cases", cases)
    rows, _ = bench("run cache", 1)
    assert [row["case"] for row in rows] == ["copy", "bf16 product 8192^3", "broken", "good"]


def test_the_indexer(bench, monkeypatch):
    given = []

    def cases(*arguments):
        given.append(arguments)
        yield Case("indexer", "small", lambda _: [Subject("us", [lambda: None])])

    monkeypatch.setattr("lab.cases.indexer.cases", cases)
    monkeypatch.setattr("lab.peers.Peer._found", (None, "no"))
    bench("indexer --backend triton --shapes prefill --most-keys 8192")
    module = types.SimpleNamespace(__version__="2.1")
    monkeypatch.setattr("lab.peers.Peer._found", (module, ""))
    rows, _ = bench("indexer --backend triton --shapes prefill --most-keys 8192")
    assert "deep_gemm" not in rows[0]
    assert rows[1]["deep_gemm"] == "2.1"
    (shapes, backends, alone, _), (*_, deep_gemm, vllm) = given
    assert {shape.keys for shape in shapes} == {8192}
    assert (backends, alone, vllm) == (("triton",), None, None)
    assert deep_gemm.module is module


@pytest.mark.usefixtures("peer")
def test_layers_and_their_timeline(bench, monkeypatch):
    def setup(model, ratio, device, *, experts, changes):
        return LayerSetup(model, ratio, device, experts=8, copies=1, changes=small_shapes.CONFIG)

    monkeypatch.setattr(layer, "LayerSetup", setup)
    monkeypatch.setattr(layer, "SideStream", lambda _: INLINE)
    monkeypatch.setattr(
        layer, "_timeline", lambda *_: [Subject("", before=lambda: {"timeline_us": [1]})]
    )
    words = "layer --model flash --ratio 0 --batch 16 --context 300 --one-queue --timeline"
    rows, said = bench(words)
    assert [row["part"] for row in rows] == ["device", "decode layer", "decode layer, timeline"]
    assert {row["side_stream"] for row in rows} == {False}
    assert rows[2]["timeline_us"] == [1]
    assert "kernels_us" not in said


def test_a_missed_target_is_exit_code_1_and_rows_of_results_stay(bench, monkeypatch):
    missed = Result("device", "copy", {"us": 2.0}, "<= 1 us", False)
    monkeypatch.setattr("anymla.bench.runner.ceilings", lambda *_: iter([missed]))
    nothing = Case("cache", "nothing", lambda _: [])
    monkeypatch.setattr("anymla.bench.gpu.cases", lambda _: iter([nothing]))
    rows, said = bench("run all", 1)
    assert rows[0]["met"] is False
    assert "MISSED" in said
