from __future__ import annotations

import json

from click.testing import CliRunner

from lab import gluon_backward
from lab.gluon_backward import child, described, main, variants


def test_the_command_draws_inputs_in_a_process_of_its_own():
    done = CliRunner().invoke(main, ["--draw"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [row["case"] for row in rows] == [str(shape) for shape in gluon_backward.SMALL]
    assert all(row["finite"] for row in rows)


def test_a_process_that_is_late_leaves_a_row():
    (row,) = child("triton", "check", 0.01)
    assert row["failed"] == "took longer than 0 s"
    assert "check failed" in described(row)


def test_what_is_wrong_is_not_timed(monkeypatch):
    names = list(variants())
    calls = []

    def answer(name, what, limit):
        calls.append((name, what))
        if what == "time":
            return [{"variant": name, "case": "one", "way": "default", "us": 1.0}]
        right = [{"variant": name, "case": "one", "way": "default", "right": name != names[1]}]
        return [] if name == names[2] else right

    monkeypatch.setattr(gluon_backward, "child", answer)
    rows = list(gluon_backward.measured(60, 1))
    timed = [name for name, what in calls if what == "time"]
    assert timed == [name for name in names if name not in names[1:3]]
    assert [row["variant"] for row in rows if "us" in row] == timed


def test_variants_are_judged_beside_triton_and_have_names():
    found = variants()
    assert [*found][:2] == ["triton", "cudnn_frontend"]
    configs = [each.config for each in found.values() if each.config]
    assert len(set(configs)) == len(configs) == len(found) - 2
    row = {
        "variant": "triton", "case": "64 heads", "way": "default", "us": 1.5, "tflops": 2.0,
        "relative_l2": [1e-3],
    }  # fmt: skip
    assert "1.5 us" in described(row)
    assert "WRONG" in described({**row, "right": False} | {"us": 1.0})
