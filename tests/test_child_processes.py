"""Processes that the package starts import nothing from the working directory."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import anymla
from anymla.audit.case import Case
from anymla.audit.packet import Packed
from anymla.audit.process import JudgeProcess
from anymla.child_process import python_command
from anymla.cli.device_report import write_report
from anymla.model.chat_template import _PROCESS, ChatTemplate
from anymla.testing.conformance.isolated import Request, run_isolated
from anymla.testing.conformance.registry import load_cases

SOURCES = Path(anymla.__file__).parent
LAB = Path(__file__).parents[1] / "lab"
PLANTED = ("torch", "numpy", "json", "socket", "selectors", "jinja2", "click")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose modules leave their names in ``ran``."""
    for name in PLANTED:
        note = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        (tmp_path / f"{name}.py").write_text(note)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    # As for a user, whose path names no working directory.
    monkeypatch.setenv("PYTHONPATH", str(SOURCES.parent))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    return tmp_path


def judge_process() -> None:

    process = JudgeProcess()
    (answer,) = process(Packed.of(Case("query", "layer 0", ["a"], [1], {})))
    assert isinstance(answer, str)
    assert "lacks" in answer
    process.close()


def conformance_jobs() -> None:
    cases = [load_cases()["A4"]]
    told = Request("reference", None, "cpu", False, ())
    (outcome,) = run_isolated(cases, told, "reference", jobs=1, timeout_s=300)
    assert "ended with 9" not in outcome.detail


def device_report() -> None:
    assert write_report(Path("report.zip").absolute(), [["doctor", "--help"]])


def python_child() -> None:
    code = "import json, click, sys; sys.exit(0 if 'torch' not in sys.modules else 1)"
    subprocess.run(python_command("-c", code), check=True)


def forkserver() -> None:
    code = (
        "from anymla.child_process import working_directory_shut_out\n"
        "import multiprocessing\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "context.set_forkserver_preload(['click'])\n"
        "process = context.Process(target=len, args=([],))\n"
        "with working_directory_shut_out(): process.start()\n"
        "process.join()\n"
        "assert process.exitcode == 0\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def chat_template() -> None:
    template = ChatTemplate("{{ messages | tojson }}", {})
    _PROCESS.close()
    try:
        assert template.render([{"role": "user", "content": "a"}]).startswith("[{")
    finally:
        _PROCESS.close()


def module_command() -> None:
    command = [sys.executable, "-m", "anymla", "conformance", "--list"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


STARTED = [
    chat_template,
    judge_process,
    conformance_jobs,
    device_report,
    python_child,
    forkserver,
    module_command,
]


@pytest.mark.parametrize("start", STARTED, ids=[each.__name__ for each in STARTED])
def test_no_planted_module_runs(start: Callable[[], None], planted: Path) -> None:
    start()
    assert not (planted / "ran").exists(), (planted / "ran").read_text()


def test_planted_modules_would_run(planted: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "json.tool"], input=b"{}", check=False)
    assert done.returncode == 9
    assert (planted / "ran").read_text() == "json"


def test_every_child_is_started_by_the_helper() -> None:
    """A new ``sys.executable`` or process context in the package is a child that nobody guards."""
    found = {
        path.name: re.findall(r"sys\.executable|get_context|spawn\(", text)
        for path in (*SOURCES.rglob("*.py"), *LAB.rglob("*.py"))
        if re.search(r"sys\.executable|get_context|mp\.spawn\(", text := path.read_text())
    }
    assert found == {
        "child_process.py": ["sys.executable"],
        "build_matrix.py": ["get_context"],
    }
    assert "with working_directory_shut_out()," in (LAB / "build_matrix.py").read_text()
