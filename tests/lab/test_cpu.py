from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from anymla.bench.report import Result, append_rows, line
from anymla.ops.attention.decode_shapes import AttentionShape
from anymla.ops.device import has_numba
from anymla.testing.published import FLASH_41
from lab.__main__ import main as command
from lab.cpu import attention, context, decode, memory, packed, selection
from lab.cpu.tiny_model import load, tiny
from lab.timing import by_round, interleaved, ratio_by_round


def test_functions_are_called_in_turns():
    calls = []
    times = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=2,
        block=3,
        warm_up=1,
    )
    assert "".join(calls) == "ab" + "aaabbb" * 2
    assert {name: len(each) for name, each in times.items()} == {"a": 6, "b": 6}


@pytest.fixture
def small_product(monkeypatch):
    """A product that CPUs without bfloat16 instructions make in no time."""
    monkeypatch.setattr("lab.cpu.ceilings._SIZE", 64)


@pytest.mark.usefixtures("small_product")
def test_packed_weights_are_timed_beside_copies(monkeypatch):
    sizes = {"_ROWS": 256, "_COLUMNS": 128, "_INNER": 128, "_EXPERTS": 4, "_CHOSEN": 2}
    for name, value in (sizes | {"TOKENS": (1, 3)}).items():
        monkeypatch.setattr(packed, name, value)
    results = packed.packed(1)
    assert len(results) == 1 + 4 * 2
    for result in results:
        values = result.values
        assert values["gb_per_s"] > 0
        assert values["share_of_copy"] == values["gb_per_s"] / values["copy_gb_per_s"]
    assert results[0].target is None
    assert all(each.met is not None for each in results[1:])
    used = "numba" if has_numba() else "torch"
    assert {each.values["backend"] for each in results[1:]} == {used}


def test_ratios_are_taken_turn_by_turn():
    # The machine was ten times slower in the second turn, for both.
    ours, theirs = [1.0, 1.0, 10.0, 10.0], [4.0, 4.0, 40.0, 40.0]
    assert by_round(ours, 2) == [1.0, 10.0]
    assert ratio_by_round(theirs, ours, 2) == 4.0


def test_rows_and_lines(tmp_path):
    results = [
        Result("part", "good", {"ms": 1.23456}, target="ms < 2", met=True),
        Result("part", "bad", {"ms": 3.0}, target="ms < 2", met=False),
        Result("other", "plain", {"mb": 2}),
    ]
    file = tmp_path / "rows.jsonl"
    append_rows(file, results[:1], {"device": "cpu"})
    append_rows(file, results[1:], {"device": "cpu"})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["good", "bad", "plain"]
    assert rows[0] == {
        "part": "part",
        "case": "good",
        "ms": 1.23456,
        "target": "ms < 2",
        "met": True,
        "device": "cpu",
    }
    assert "met" not in rows[2]
    assert [line(result, 5) for result in results] == [
        "  good   ms 1.235  [met: ms < 2]",
        "  bad    ms 3  [MISSED: ms < 2]",
        "  plain  mb 2",
    ]


def test_flops_of_a_shape():
    # Two products of 2 x 3 x 5 x 7 multiplications and additions each.
    assert AttentionShape(tokens=2, heads=3, window=4, entries=1, dim=7).flops == 2 * 2 * 210


def test_attention_is_checked_before_it_is_timed(monkeypatch):
    wrong = lambda q, *_, **__: (torch.zeros_like(q), torch.zeros(q.shape[:2]))  # noqa: E731
    real = attention.sparse_attention

    def broken(q, *args, backend=None, **keywords):
        run = real if backend == "reference" else wrong
        return run(q, *args, **keywords)

    monkeypatch.setattr(attention, "sparse_attention", broken)
    with pytest.raises(AssertionError, match="attention"):
        attention.attention(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny(tmp_path_factory.mktemp("tiny") / "checkpoint"), torch.bfloat16)


def test_filled_caches_hold_what_the_context_needs(model):
    engine = context.filled_engine(model, 1500, rounds=1)
    state = engine.state("bench")
    assert state.computed == 1500
    groups = {group.name: group for group in engine.store.groups}
    held = {name: engine.store.tables[name].held(state.row) for name in groups}
    # All entries of 1500 tokens; of the window, the pages that reach 127 tokens back.
    assert set(held["c4"]) == set(range(-(-(1500 // 4) // 64)))
    assert set(held["c128"]) == set(range(-(-(1500 // 128) // 2)))
    assert set(held["window"]) == set(range((1500 - 127) // 64, 1500 // 64 + 1))
    for _ in range(3):
        assert len(engine.step().new_tokens["bench"]) == 1


def test_caches_take_the_bytes_of_their_layouts(tmp_path):
    results = memory.cache_bytes(tmp_path / "checkpoint")
    assert len(results) == 3
    assert all(result.met for result in results)
    sizes = [result.values["mb"] for result in results]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.slow
def test_both_models_choose_the_same_tokens(tmp_path):
    results = decode.decode(tmp_path / "checkpoint", 1)
    ours, exact, peer = results
    assert peer.case == "transformers fp32"
    for result in (ours, exact):
        assert result.values["times_transformers"] > 0
    assert ours.target is not None


@pytest.mark.usefixtures("small_product")
def test_command_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(command, ["cpu", "--quick", "--part", "machine", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "bf16 matrix product" in done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["device"] == "cpu"
        assert row["threads"] == 1
        assert row["torch"] == torch.__version__
        assert str(tmp_path) not in json.dumps(row)


def test_selection_is_timed_at_contexts_of_which_the_blocks_hold_a_part():
    results = selection.selection(2)
    cases = [f"{entries} entries" for entries in selection.CONTEXTS]
    assert [result.case for result in results] == cases
    assert all(0 < r.values["ms_p10"] <= r.values["ms"] <= r.values["ms_p90"] for r in results)
    text = FLASH_41["text_config"]
    held = text["candidate_topk_blocks"] * text["candidate_block_size"]
    assert selection.CONTEXTS[0] == held < min(selection.CONTEXTS[1:])


@pytest.mark.usefixtures("small_product")
def test_without_transformers_the_part_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    parts = ["--part", "machine", "--part", "decode"]
    done = CliRunner().invoke(command, ["cpu", "--quick", *parts])
    assert done.exit_code == 0
    assert "decode: not measured: transformers is not installed" in done.output
    # Where there was no other part, nothing was measured.
    done = CliRunner().invoke(command, ["cpu", "--quick", *parts[2:]])
    assert done.exit_code == 2
    assert done.stderr == "Error: --part decode: nothing was measured\n"


def test_a_missed_target_ends_with_exit_code_1(monkeypatch):
    missed = [Result("part", "case", {"ms": 3.0}, target="ms < 2", met=False)]
    monkeypatch.setattr("lab.cli.cpu.parts", lambda quick: {"machine": lambda: missed})
    done = CliRunner().invoke(command, ["cpu"])
    assert done.exit_code == 1
    assert "MISSED" in done.output
