import logging
import threading
from pathlib import Path

import pytest
from healthy import case_of

from anymla.audit import judge, load_case
from anymla.audit.auditor import Auditor
from anymla.audit.case import Case
from anymla.audit.packet import Packed
from anymla.audit.process import JudgeProcess, judge_here
from anymla.audit.settings import Settings
from anymla.testing.pytest_plugin import inference_rules  # noqa: F401

LOG = logging.getLogger("anymla.test")


def auditor_of(**settings: int | str) -> Auditor:
    return Auditor(Settings(**settings), LOG, {"engine": "none"})  # type: ignore[arg-type]


def test_settings_are_read_and_wrong_ones_named() -> None:
    assert Settings.of("") == Settings()
    assert Settings.of(" every=20, requests=4,directory=d") == Settings(
        every=20, requests=4, directory="d"
    )
    for text, why in (
        ("evry=2", "no setting 'evry'"),
        ("every=x", "must be a number"),
        ("every=0", "at least 1"),
        ("requests=-1", "at least 1"),
    ):
        with pytest.raises(ValueError, match=why):
            Settings.of(text)


def test_one_step_in_so_many_is_audited() -> None:
    auditor = auditor_of(every=5)
    active = []
    for _ in range(12):
        expected = auditor.next_is_audited()
        auditor.begin()
        assert auditor.active == expected
        active.append(auditor.active)
        auditor.end(1)
    assert [i + 1 for i, each in enumerate(active) if each] == [5, 10]
    assert (auditor.step, auditor.audited) == (12, 2)


def test_a_step_that_is_skipped_counts_as_such() -> None:
    auditor = auditor_of(every=2)
    for _ in range(4):
        auditor.begin()
        auditor.skip()
        assert not auditor.active
        auditor.end(1)
    assert (auditor.step, auditor.audited, auditor.skipped) == (4, 0, 2)


def test_layers_come_in_turn_and_choices_repeat() -> None:
    seen: list[str] = []
    auditor = auditor_of(every=1, layers=2)
    other = auditor_of(every=1, layers=2)
    for _ in range(6):
        auditor.begin()
        other.begin()
        seen += auditor.turn(["a", "b", "c"])
        assert auditor.random("x").random() == other.random("x").random()
        assert auditor.random("x").random() != auditor.random("y").random()
    assert sorted(seen) == sorted("abc" * 4)


def test_an_alarm_is_told_dumped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auditor = auditor_of(every=1, directory=str(tmp_path / "dumps"), dumps=1)
    auditor.begin()
    for shift in (0.0, 1.0, 2.0):
        case = case_of("query")
        case.tensors["out"][1, 0, 3] += shift
        auditor.submit(case)
    auditor.drain()
    tally = auditor.tallies["query"]
    assert (tally.judged, tally.tokens, tally.alarms) == (3, 9, 2)
    assert len(auditor.alarms) == 2
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == 2
    assert "query of layer 0, request request 1, position 515, step 1" in lines[0]
    dumped = list((tmp_path / "dumps").glob("*.safetensors"))
    assert len(dumped) == 1
    assert len(list((tmp_path / "dumps").iterdir())) == 2  # and its report
    assert str(dumped[0]) in lines[0]
    case, found = load_case(dumped[0])
    assert case.made_by == {"engine": "none"}
    assert "query[0, 3]" in found["what"]
    assert "2 alarms" in auditor.summary()


def test_a_dump_is_its_owners_and_takes_no_name_that_is_there(tmp_path: Path, caplog) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "new" / "dumps"
    auditor = auditor_of(every=1, directory=str(directory))

    def dumped() -> set[Path]:
        wrong = case_of("query")
        wrong.tensors["out"][0, 0] += 100
        auditor.submit(wrong)
        auditor.drain()
        written = set(directory.iterdir())
        assert {file.lstat().st_mode & 0o777 for file in written if not file.is_symlink()} == {
            0o600
        }
        return {file for file in written if file.suffix == ".safetensors"}

    (first,) = dumped()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert first.stat().st_mode & 0o777 == 0o600
    # The next name is a link that somebody has laid.
    laid = first.with_name(first.name.replace("-1.safetensors", "-2.safetensors"))
    laid.symlink_to(victim)
    (second,) = dumped() - {first, laid}
    assert second.name.endswith("-3.safetensors")
    assert load_case(second)[0].method == "query"
    assert victim.read_text() == "precious"


def test_a_dump_beyond_its_limit_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auditor = auditor_of(every=1, directory=str(tmp_path), mebibytes=1)
    case = case_of("projection")
    case.tensors["wo_a"] = case.tensors["wo_a"].repeat(5, 1, 1)
    case.tensors["out"][0, 0] += 100
    case.tensors["wo_a"] = case.tensors["wo_a"][:2].contiguous()
    case.tensors["padding"] = case.tensors["o"].new_zeros(1 << 20)
    auditor.submit(case)
    auditor.drain()
    assert not list(tmp_path.iterdir())
    assert "not dumped: 2 MiB" in caplog.text


def test_a_fault_of_the_audit_does_not_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    auditor = auditor_of(every=1)
    auditor.submit(Case("query", "layer 0", ["a"], [1], {}))
    auditor.submit(case_of("query"))
    auditor.drain()
    assert auditor.skipped == 1
    assert auditor.tallies["query"].judged == 1
    assert "cannot be judged" in caplog.text


def test_cases_that_come_too_fast_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from anymla.audit import auditor as module

    monkeypatch.setattr(module, "_WAITING", 2)
    free = threading.Event()
    auditor = Auditor(
        Settings(every=1), LOG, {}, [lambda packed: free.wait() and judge_here(packed)]
    )
    for _ in range(6):
        auditor.submit(case_of("slots"))
    assert auditor.full
    assert auditor.skipped >= 3  # one is with the judge, two wait
    free.set()
    auditor.drain()
    assert auditor.tallies["slots"].judged == 6 - auditor.skipped


def test_several_judges_share_the_work() -> None:
    both = threading.Barrier(2, timeout=20)
    judges = [lambda packed: both.wait() >= 0 and judge_here(packed) for _ in range(2)]
    auditor = Auditor(Settings(every=1), LOG, {}, judges)
    for _ in range(2):
        auditor.submit(case_of("slots"))
    auditor.drain()
    assert auditor.tallies["slots"].judged == 2


def test_a_case_is_read_before_its_tensors_change() -> None:
    auditor, case = auditor_of(every=1), case_of("query")
    auditor.submit(case)
    case.tensors["out"].zero_()
    auditor.drain()
    assert not auditor.alarms


def test_a_process_judges_as_this_one_does(caplog: pytest.LogCaptureFixture) -> None:
    process = JudgeProcess()
    right, wrong = case_of("attention"), case_of("selection")
    wrong.tensors["chosen"][0] = 50
    for case in (right, wrong):
        assert process(Packed.of(case)) == [judge(case)]
    (answer,) = process(Packed.of(Case("query", "layer 0", ["a"], [1], {})))
    assert isinstance(answer, str)
    assert "lacks 'out'" in answer
    assert process(Packed.of(right)) == [judge(right)]  # it lives on
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process(Packed.of(right)) == [judge(right)]  # another one
    auditor = Auditor(Settings(every=1), LOG, {}, [process])
    auditor.submit(wrong)
    auditor.drain()
    assert auditor.tallies["selection"].alarms == 1
    process.close()


def test_figures_are_told_and_a_fault_of_that_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auditor = auditor_of(every=1)
    told: list[tuple[int, int]] = []
    auditor.changed = lambda: told.append((auditor.audited, auditor.tallies["query"].judged))
    auditor.begin()
    auditor.submit(case_of("query"))
    auditor.drain()
    auditor.end(1)
    assert told == [(1, 1), (1, 1)]
    auditor.changed = lambda: told[5]  # type: ignore[assignment, return-value]
    for _ in range(2):
        auditor.begin()
        auditor.end(1)
    assert auditor.audited == 3
    assert caplog.text.count("not published from here on") == 1
