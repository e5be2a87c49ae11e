"""Every schedule of a random shape, made small: it is run as it says, and its row says which."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from anymla.bench.runner import run
from anymla.ops.attention import gluon_sm90_decode_launch, sparse_attention
from anymla.ops.attention.decode_config import schedules
from lab.cases import decode_schedules
from lab.cases import sparse_attention as family


@pytest.fixture
def ran(monkeypatch):
    """The schedules of calls, whose results are the reference's."""
    seen = []

    def attend(call, to):
        seen.append(call.schedule)
        assert (call.plan is not None) == call.schedule.planned
        sparse_attention(call.q, call.rows, sink=call.sink, out=to.out, backend="torch")

    monkeypatch.setattr(gluon_sm90_decode_launch, "attend", attend)
    monkeypatch.setattr(gluon_sm90_decode_launch, "make_plan", lambda *_: "a plan")
    monkeypatch.setattr(gluon_sm90_decode_launch, "_with_lengths", lambda rows: rows)
    monkeypatch.setattr(family, "_WINDOW_SLOTS", 512)
    monkeypatch.setattr(family, "_EXTRA_SLOTS", 512)
    monkeypatch.setattr(family, "_MOST_LISTS", 2)
    return seen


@pytest.mark.parametrize("ragged", [False, True])
def test_each_schedule_has_a_row(ran, clock, ragged):
    shape = family.Drawn(2, 3, 24, 100, ragged=ragged, draw=1, number=2)
    every = [*schedules(6, 24, 4, 132, lengths=True, planned=True)]
    results = [*run(decode_schedules.schedule_cases([shape], 132), clock)]
    assert len(results) == len(every) == len({result.case for result in results}) > 8
    assert [*dict.fromkeys(ran)] == every
    assert sum(result.values["chosen"] for result in results) == 1
    for result, schedule in zip(results, every, strict=True):
        values = result.values
        assert values["error"] < 3e-3
        assert values["cut"] == schedule.cut.name
        assert (values["tile_heads"], values["heads"]) == (schedule.heads, 24)
        assert values.items() >= {"microseconds": 10.0, "seed": 1002}.items()
        assert ("predicted_microseconds" in values) is not ragged
    if not ragged:
        best = min(results, key=lambda result: result.values["predicted_microseconds"])
        assert best.values["predicted_microseconds"] < 20
