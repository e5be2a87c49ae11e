"""An alarm says in a few lines what is wrong, what it looks like, and how to see it again."""

import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from healthy import case_of
from torch import Tensor

from anymla.audit import judge
from anymla.audit.auditor import Auditor, report
from anymla.audit.case import Case
from anymla.audit.looks import places, same_bytes
from anymla.audit.settings import Settings
from anymla.cli.main import main
from anymla.testing.pytest_plugin import inference_rules  # noqa: F401

Fault = Callable[[Case], None]


def _head_of_nan(case: Case) -> None:
    case.tensors["out"][1] = torch.nan


def _head_of_zeros(case: Case) -> None:
    case.tensors["out"][2] = 0


def _half(case: Case) -> None:
    case.tensors["out"] *= 0.5


def _one_channel(case: Case) -> None:
    case.tensors["out"][0, 7] += 100


def _another_token(name: str) -> Fault:
    def fault(case: Case) -> None:
        case.tensors[name] = case.tensors[name].roll(1, 0)

    return fault


def _clear(name: str) -> Fault:
    def fault(case: Case) -> None:
        case.tensors[name] = case.tensors[name].clone()
        case.tensors[name][0] = 0

    return fault


def _scale_byte(case: Case) -> None:
    case.tensors["scales"][0, 2] ^= 1


def _foreign_page(case: Case) -> None:
    case.tensors["listed"].view(-1)[40:44] = 999 * 64 + torch.arange(4)


def _listed_twice(case: Case) -> None:
    listed = case.tensors["listed"].view(-1)
    listed[40] = listed[41]


def _cut_short(case: Case) -> None:
    case.tensors["length"] = torch.tensor(3)


def _overwritten(case: Case) -> None:
    case.tensors["after"] = case.tensors["after"].clone()
    case.tensors["after"][1] = 0


@pytest.mark.parametrize(
    ("method", "fault", "looks"),
    [
        ("attention", _head_of_nan, r"out, 512 of \d+ values, head 1 of \d+: NaN"),
        ("attention", _head_of_zeros, r"out, \d+ of \d+ values, head 2 of \d+.*: zeros"),
        ("attention", _half, r"out, .*all \d+ heads.*: 0.5 times what they should be"),
        ("attention", _one_channel, r"out, 1 of \d+ values, head 0 of \d+, channel 7 of 512"),
        (
            "qkv_norm",
            _another_token("kv_out"),
            r"kv, .*: the values of request request 2, position",
        ),
        ("window_row", _another_token("data"), r".* of 512 values"),
        ("window_row", _scale_byte, r"6\d of 512 values, channels 128 to 191 of 512"),
        ("window_row", _clear("data"), r".* of 512 values.*"),
        ("slots", _foreign_page, r"slots of page 999, which is not the request's place"),
        ("slots", _listed_twice, r"1 listed twice"),
        ("slots", _cut_short, r"\d+ left out"),
        ("at_rest", _overwritten, r"1 of \d+ rows looked at again: zeros"),
        ("linear", _another_token("y"), r"y, .*: the values of request"),
    ],
)
def test_what_is_wrong_is_described(method: str, fault: Fault, looks: str) -> None:
    case = case_of(method)
    fault(case)
    found = judge(case)
    assert not found.ok
    assert re.search(looks, found.looks), found.looks


def test_a_healthy_case_looks_like_nothing() -> None:
    for method in ("attention", "window_row", "slots", "at_rest", "qkv_norm"):
        found = judge(case_of(method))
        assert (found.ok, found.first, found.looks) == (True, "", "")


def test_the_first_value_is_told_where_another_is_the_worst() -> None:
    case = case_of("attention")
    case.tensors["out"][0, 7] += 1
    case.tensors["out"][3, 9] += 100
    found = judge(case)
    assert found.what.startswith("out[3, 9] is ")
    assert found.first.startswith("out[0, 7] is ")
    lines = report(case, found, None)
    assert len(lines) == 3
    assert lines[1].startswith("first: out[0, 7] is ")
    assert lines[2].startswith("looks: out, 2 of ")


def test_an_alarm_ends_with_the_command_that_repeats_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lines lie beside the dump as well; the command fails as the engine's result does."""
    directory = tmp_path / "with a space"
    auditor = Auditor(
        Settings(every=1, directory=str(directory)), logging.getLogger("audit"), {"torch": "x"}
    )
    case = case_of("attention")
    _head_of_zeros(case)
    auditor.step = 12
    auditor.submit(case)
    auditor.drain()
    said = caplog.text[caplog.text.index("audit: ") :].splitlines()
    assert re.match(
        r"audit: attention of .*, request .*, position \d+, step 12: factor of\[2\]", said[0]
    )
    assert [line.split(":")[0].strip() for line in said[1:]] in (
        ["looks", "repeat"],
        ["first", "looks", "repeat"],
    )
    program, *words = shlex.split(said[-1].partition("repeat: ")[2])
    assert program == "anymla"
    dump = Path(words[1])
    written = dump.with_suffix(".txt").read_text().splitlines()
    assert written[0] == said[0].removeprefix("audit: ")
    assert written[-1].startswith("inputs ")
    assert written[-1].endswith("made by torch x")
    assert len(written) <= 5
    result = CliRunner().invoke(main, [*words, "--device", "cpu"])
    assert result.exit_code == 1
    assert "looks: out, " in result.stdout
    assert "engine: WRONG" in result.stdout
    assert "torch: ok" in result.stdout


def test_without_a_folder_the_alarm_says_how_to_keep_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auditor = Auditor(Settings(every=1), logging.getLogger("audit"), {})
    case = case_of("attention")
    _half(case)
    auditor.submit(case)
    auditor.drain()
    assert "repeat: ANYMLA_AUDIT=directory=DIR keeps what can be replayed" in caplog.text


def test_places_are_listed_by_runs() -> None:
    def wrong(*places: tuple[int, int]) -> Tensor:
        found = torch.zeros(16, 512, dtype=torch.bool)
        for place in places:
            found[place] = True
        return found

    assert places(wrong((3, 9)), "head") == "1 of 8192 values, head 3 of 16, channel 9 of 512"
    several = places(wrong((0, 1), (2, 2), (4, 3), (6, 4), (8, 5)), "head")
    assert several == ("5 of 8192 values, 5 of 16 heads (0, 2, 4, 6, ..), channels 1 to 5 of 512")
    assert places(torch.ones(1, dtype=torch.bool)) == "the only value"


def test_bytes_are_recognised() -> None:
    rows = torch.tensor([[1, 2], [0, 0], [7, 7], [1, 2]], dtype=torch.uint8)
    names = ["a", "b", "c", "d"]
    found = [same_bytes(rows, row, names) for row in range(3)]
    assert found == ["the bytes of d", "zeros", "all bytes 7"]
