"""Measurements of transformers' layers at small sizes on a CPU, and processes that end early."""

import functools
import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", minversion="5.23")

from lab import transformers_layers
from lab.transformers_layers import KINDS, Layer, results

SMALL = {
    "hidden_size": 128, "num_attention_heads": 4, "q_lora_rank": 64, "o_groups": 2,
    "o_lora_rank": 32, "index_n_heads": 4,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transformers_layers, "Layer", functools.partial(Layer, **SMALL))
    monkeypatch.setattr(transformers_layers, "COMPARED", 200)
    monkeypatch.setattr(transformers_layers, "LENGTHS", {"anymla": (140,), "eager": (140,)})


@pytest.mark.parametrize("layer", KINDS)
def test_a_process_compares_and_then_measures(small, layer, tmp_path):
    with torch.inference_mode(False):
        compared, row = results("anymla", layer, tmp_path / "turns")
        (alone,) = results("eager", layer, tmp_path / "turns")
    ours, eager = (compared[f"{name} error"].values() for name in ("anymla", "eager"))
    for error, bound in zip(ours, eager, strict=True):
        assert 0 < error < 1.25 * bound
    for each in (row, alone):
        assert each["tokens"] == 140
        assert each["forward ms"] > 0
        assert each["training step ms"] > 0


def test_memory_that_ends_is_a_result(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    layer = Layer("window", torch.device("cpu"), **SMALL)
    monkeypatch.setattr(layer, "_once", fails)
    error = "OutOfMemoryError: CUDA out of memory."
    assert layer.measured("eager", 9) == {
        "tokens": 9, "forward error": error, "training step error": error
    }  # fmt: skip


def test_what_a_process_printed_before_its_time_was_over():
    words = ["-c", "import time; print(1, flush=True); time.sleep(60)"]
    assert transformers_layers._run(words, 3) == (["1"], "more than 3 s")
    words = ["-c", "print(2); raise SystemExit('no')"]
    assert transformers_layers._run(words, 30) == (["2"], "exit code 1: no")


def test_every_case_has_a_row_and_the_example_one(monkeypatch, tmp_path):
    def ran(words, limit):
        return (["{}"], "") if "--one" in words else (["loss"], "late")

    monkeypatch.setattr(transformers_layers, "_run", ran)
    path = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(transformers_layers.main, [str(path)], catch_exceptions=False)
    printed = [json.loads(line) for line in done.output.splitlines()]
    assert len(printed) == 2 * len(KINDS) + 1
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row | each for row, each in zip(kept, printed, strict=True)] == kept
    assert printed[-1]["error"] == "late"
