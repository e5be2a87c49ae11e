"""``anymla bench run``: names of cases, and what is timed on a CPU."""

import json

import pytest
from click.testing import CliRunner, Result

from anymla.bench.gpu import cases, chosen_cases, families, name_of
from anymla.bench.kernels import decoder
from anymla.bench.runner import Case, Subject, run
from anymla.cli.main import main

SMALL = {
    "hidden_size": 256, "num_attention_heads": 4, "o_groups": 2, "o_lora_rank": 128,
    "q_lora_rank": 128, "index_n_heads": 4, "index_topk": 16, "moe_intermediate_size": 128,
}  # fmt: skip


def bench(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", "run", *words])


def test_every_case_has_a_name_of_its_own_which_is_listed() -> None:
    names = [name_of(case) for case in cases(families())]
    assert len({*names}) == len(names) > 150
    assert bench().stdout.split() == names
    assert {name.partition("/")[0] for name in names} == {*families()}
    assert {"decoder/layer-of-v4-flash-ratio-4-8-requests", "cache/rope-1-tokens"} <= {*names}


def test_cases_are_chosen_by_name_by_family_and_all() -> None:
    (one,) = chosen_cases(["cache/rope-1-tokens"])
    assert (one.part, one.label) == ("cache", "rope, 1 tokens")
    both = chosen_cases(["cache/rope-1-tokens", "engram", "cache/rope-1-tokens"])
    assert [case.part for case in both] == ["cache"] + ["engram"] * (len(both) - 1)
    assert len(chosen_cases(["all"])) == len(list(cases(families())))


def test_a_name_that_there_is_not_is_one_line_with_those_that_are_near() -> None:
    result = bench("cache/rope-1-token")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: cache/rope-1-token: no such case: did you mean")
    assert "cache/rope-1-tokens" in result.stderr
    assert bench("?").stderr == "Error: ?: no such case: anymla bench run lists them\n"


def test_a_case_is_timed_on_the_cpu_beside_its_copy(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("anymla.bench.runner.ceilings", lambda *_: iter(()))
    file = tmp_path / "rows.jsonl"
    result = bench("cache/rope-1-tokens", "--json", str(file))
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["part"], row["case"], row["device"]) == ("cache", "rope, 1 tokens", "cpu")
    assert row["us"] > 0
    assert "share_of_copy" in row
    assert "target" not in row


def test_layers_and_steps_run() -> None:
    from anymla.bench.cpu_clock import CpuClock

    small = list(decoder.cases((4,), (2,), (1,), SMALL))
    results = list(run(small, CpuClock()))
    assert [result.case for result in results] == [
        "layer of V4-Flash, ratio 4, 2 requests", "step of a tiny model, 1 request",
    ]  # fmt: skip
    assert all(result.values["us"] > 0 for result in results)


def test_the_old_name_says_the_new_one(monkeypatch) -> None:
    ran = []
    monkeypatch.setattr("anymla.cli.bench.measure", lambda chosen, *_, **__: ran.extend(chosen))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "anymla.bench.gpu.cases",
        lambda _: iter([Case("cache", "small", lambda _: [Subject("us", [lambda: None])])]),
    )
    done = CliRunner().invoke(main, ["bench", "gpu", "--family", "cache"])
    assert done.exit_code == 0, done.output
    assert done.stderr == "anymla bench gpu is now anymla bench run cache\n"
    assert [case.label for case in ran] == ["small"]


@pytest.mark.parametrize("words", [("gpu",), ("layer",)])
def test_old_names_are_not_in_the_help(words) -> None:
    shown = CliRunner().invoke(main, ["bench", "--help"]).stdout
    assert f"\n  {words[0]} " not in shown
    assert "\n  run " in shown
