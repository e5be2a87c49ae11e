"""The benchmark runner on a clock that needs no GPU."""

from __future__ import annotations

import contextlib
import types
import weakref
from importlib import metadata

import pytest
import torch

from anymla.bench.runner import Case, Subject, beside, ceilings, facts, rounded, run
from anymla.ops.registry import BackendUnavailable
from lab.peers import Peer
from lab.timing import begun_within

TWICE = beside("us", "peer_us", 2.0, "twice")


def one(*subjects, **more):
    return Case("part", "case", lambda _: subjects, **more)


def test_a_row_is_fields_subjects_and_what_is_made_of_them(scripted):
    ours = Subject(
        "us",
        [lambda: None] * 3,
        repetitions=7,
        per=2,
        before=lambda: {"error": 0.5},
        after=lambda us: {"rate": 1 / us},
    )
    clock = scripted(8.0, 6.0)
    case = one(ours, Subject("peer_us", [lambda: None]), fields={"batch": 3}, judge=TWICE, seed=4)
    (result,) = run([case], clock)
    assert list(result.values.items()) == [
        ("batch", 3), ("seed", 4), ("error", 0.5), ("us", 4.0), ("rate", 0.25), ("peer_us", 6.0),
        ("ratio", 1.5),
    ]  # fmt: skip
    assert (result.part, result.case, result.target, result.met) == ("part", "case", "twice", False)
    assert clock.seen == [(3, 7), (1, 20), "release"]


def test_inputs_depend_on_the_seed_alone_and_are_held_one_case_at_a_time(clock):
    drawn, held = [], []

    def subjects(clock):
        inputs = torch.rand(3, device=clock.device)
        assert not any(ref() is not None for ref in held)
        held.append(weakref.ref(inputs))
        drawn.append(inputs.tolist())
        yield Subject("us", [lambda: inputs + 1])

    for seeds in ((0, 5, 0), (5,)):
        list(run((Case("part", "case", subjects, seed=seed) for seed in seeds), clock))
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


def test_a_case_is_gone_when_the_next_is_made(clock):
    held = []

    def cases():
        for _ in range(3):
            assert not any(ref() is not None for ref in held)
            weights = torch.ones(2)
            held.append(weakref.ref(weights))
            case = one(Subject("us", [weights.sum]))
            del weights
            yield case
            del case

    assert len(list(run(cases(), clock))) == 3


def test_later_subjects_are_drawn_when_the_earlier_are_timed(clock):
    order = []

    def subjects(_):
        yield Subject("us", [lambda: order.append("timed")])
        order.append("peer drawn")
        yield Subject("peer_us", [lambda: None])

    list(run([Case("part", "case", subjects)], clock))
    assert order == ["timed", "timed", "peer drawn"]


def test_a_subject_is_checked_and_timed_in_its_context(clock):
    inside = []

    @contextlib.contextmanager
    def within():
        inside.append("in")
        yield
        inside.append("out")

    def note(what):
        inside.append(what)
        return {}

    subject = Subject(
        "us",
        [lambda: inside.append("call")],
        before=lambda: note("before"),
        after=lambda _: note("after"),
        within=within,
    )
    list(run([one(subject)], clock))
    assert inside == ["in", "before", "call", "call", "after", "out"]


def fails():
    raise RuntimeError("no such shape\nand more")


def test_what_may_fail_is_left_out_and_what_may_not_ends_the_run(clock):
    good = Subject("us", [lambda: None])
    optional = Subject("peer_us", [fails], before=lambda: {"peer_error": 1.0}, optional=True)
    (result,) = run([one(optional, good)], clock)
    assert result.values == {"seed": 0, "us": 10.0}
    broken = one(Subject("us", [fails]))
    with pytest.raises(RuntimeError, match="no such shape"):
        list(run([broken, one(good)], clock))
    bad, after = run([broken, one(good)], clock, failures_are_rows=True)
    assert bad.values == {"error": "RuntimeError: no such shape"}
    assert (bad.target, bad.met, after.values["us"]) == ("runs", False, 10.0)


def test_a_case_without_subjects_gives_no_row(clock):
    assert list(run([one(), one(Subject("us", [fails], optional=True))], clock)) == []


def test_a_subject_may_have_fields_without_being_timed(clock):
    (result,) = run([one(Subject("", before=lambda: {"spans": [1]}))], clock)
    assert result.values == {"seed": 0, "spans": [1]}
    assert clock.seen == ["release"]


def test_verdicts_rounding_and_ceilings(clock):
    assert TWICE({"us": 1.0}) == ({"us": 1.0}, None)
    assert TWICE({"us": 1.0, "peer_us": 2.0})[1] == ("twice", True)
    assert TWICE({"us": 1.0, "peer_us": 1.99})[1] == ("twice", False)
    assert rounded({"us": 1.26, "rows": 3, "x": 1.26}, {"us": 1, "y": 2}) == {
        "us": 1.3, "rows": 3, "x": 1.26
    }  # fmt: skip
    copy, product = ceilings(clock)
    assert (copy.values, product.values) == ({"tb_per_s": 4.0}, {"tflops": 800.0})
    assert list(ceilings(clock, ["copy"])) == [copy]


class Library(Peer):
    name, title, modules = "library", "The library", ("vllm.library", "library")


def test_a_peer_is_the_first_module_that_can_be_imported():
    def find(name):
        if name != "library":
            raise ImportError(f"No module named {name!r}")
        return types.SimpleNamespace(__version__="1.2")

    peer = Library(find)
    assert peer.available()
    assert peer.version() == "1.2"
    assert Library(lambda name: types.ModuleType("torch.library")).version() == (
        f"torch {metadata.version('torch')}"
    )
    assert Library(lambda name: types.ModuleType("nobody.s")).version() is None
    assert Library(lambda name: object()).version() is None


def test_a_peer_that_is_not_here_says_why():
    def find(name):
        if name == "library":
            raise OSError("libcuda.so: cannot open shared object file")
        raise ImportError(f"No module named {name!r}")

    peer = Library(find)
    reason = (
        "The library cannot be imported (vllm.library: No module named 'vllm.library'; "
        "library: libcuda.so: cannot open shared object file)"
    )
    assert not peer.available()
    assert peer.available().reason == reason
    with pytest.raises(BackendUnavailable, match="cannot be imported"):
        peer.version()


def test_every_row_says_what_it_was_measured_on_and_with():
    peer = Library(lambda name: types.SimpleNamespace(__version__="1.2"))
    row = facts("anymla bench x", {"device": "NVIDIA H200", "triton": "3.6"}, [peer])
    assert row["command"] == "anymla bench x"
    assert row["device"] == "NVIDIA H200"
    assert (row["triton"], row["library"]) == ("3.6", "1.2")
    assert {"commit", "date", "torch", "anymla", "cpu"} <= set(row)


def test_nothing_begins_after_the_end():
    now = iter([1.0, 2.0, 2.5])
    made = []
    items = (made.append(number) or number for number in range(9))
    assert list(begun_within(items, 2.0, lambda: next(now))) == [0, 1]
    assert made == [0, 1, 2]  # a case that has not begun holds nothing
