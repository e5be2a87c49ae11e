import json
import re
import subprocess
import sys
import types
import zipfile

import click
import pytest
import torch
from click.testing import CliRunner, Result

from anymla.cli import doctor as doctor_command
from anymla.cli import machine as machine_facts
from anymla.cli.device_report import _last_line, report_steps, write_report
from anymla.cli.machine import _busy, machine
from anymla.cli.main import main
from anymla.ops import device as device_facts
from anymla.ops.attention import sparse_attention
from anymla.ops.device import has_numba
from anymla.ops.linear import fp8_block_linear
from anymla.ops.registry import Backend
from anymla.ops.step_indices import window_rows
from anymla.testing.conformance.calls import Watch, family_of
from anymla.testing.conformance.ops import Ops, all_operations
from anymla.testing.conformance.registry import load_cases

CPU = torch.device("cpu")


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_every_family_is_judged_and_right_here(tmp_path) -> None:
    file = tmp_path / "doctor.json"
    result = doctor("--device", "cpu", "--json", file)
    assert result.exit_code == 0, result.output
    assert "every result is right" in result.output
    row = json.loads(file.read_text())
    families = {family_of(operation) for operation in all_operations().values()}
    assert {finding["family"] for finding in row["findings"]} == families
    assert row["ok"] is True
    assert row["torch"] == torch.__version__
    here = {"torch", "numba"} if has_numba() else {"torch"}
    assert {finding["backend"] for finding in row["findings"]} == here
    assert {finding["how"] for finding in row["findings"]} == {"native"}
    assert all(finding["right"] for finding in row["findings"])
    quick = [case.case_id for case in load_cases().values() if case.quick]
    assert [case["case_id"] for case in row["cases"]] == quick
    assert {case["status"] for case in row["cases"]} == {"passed"}
    errors = [case["error"] for case in row["cases"] if case["error"] is not None]
    assert max(errors) > 0
    assert all(0 <= error <= 1 for error in errors)


def test_it_works_without_triton_and_prints_a_row_to_share() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from anymla.cli.main import main\n"
        "main(['doctor', '--device', 'cpu', '--json', '-', '--family', 'step_indices'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["triton"] == "not installed"
    reasons = {finding["why_not"].get("triton") for finding in row["findings"]}
    assert reasons == {"triton is not installed"}


@pytest.mark.parametrize(
    ("operation", "case_id", "wrong"),
    [
        (sparse_attention, "A2", lambda out, lse: (out, lse + 1)),
        (fp8_block_linear, "M7", lambda out: out + 30),
    ],
)
def test_a_wrong_result_is_shown_and_ends_with_1(monkeypatch, operation, case_id, wrong) -> None:
    run = operation.backends["torch"].run

    def faulty(*args, **kwargs):
        result = run(*args, **kwargs)
        return wrong(*result) if isinstance(result, tuple) else wrong(result)

    one_case(monkeypatch, case_id)
    with operation.with_backends([Backend("torch", faulty, None)]):
        result = doctor("--device", "cpu")
    assert result.exit_code == 1
    assert f"WRONG: {case_id}\n" in result.output
    assert "anymla doctor --report report.zip" in result.output
    assert re.search(rf"{operation.name} +torch +{case_id}  WRONG\n", result.output)


def one_case(monkeypatch: pytest.MonkeyPatch, case_id: str) -> None:
    monkeypatch.setattr(doctor_command, "_quick_cases", lambda _: [load_cases()[case_id]])


def test_an_operation_that_cannot_run_says_so(monkeypatch) -> None:
    one_case(monkeypatch, "A9")
    with window_rows.with_backends([]):
        result = doctor("--device", "cpu")
    assert (result.exit_code, "cannot run here: A9\n" in result.output) == (0, True)
    assert re.search(r"step_indices +window_rows +- +A9  cannot\n", result.output)
    assert "no backend can run this call" in result.output


def test_a_general_backend_on_an_accelerator_is_a_fallback() -> None:
    assert doctor_command._how("torch", torch.device("xpu")) == "fallback"
    assert doctor_command._how("triton", torch.device("xpu")) == "native"
    assert doctor_command._how("torch", torch.device("cpu")) == "native"


def test_one_family() -> None:
    result = doctor("--device", "cpu", "--family", "step_indices")
    assert result.exit_code == 0
    assert "window_rows" in result.output
    assert "sparse_attention" not in result.output
    result = doctor("--family", "attend")
    assert result.exit_code == 2
    assert "--family attend: there are attention, choice" in result.output


def test_speeds_are_not_measured_any_more(monkeypatch) -> None:
    one_case(monkeypatch, "A9")
    result = doctor("--device", "cpu", "--no-speed")
    assert result.exit_code == 0
    assert result.stderr.startswith("--no-speed: doctor times nothing")


def test_a_device_that_is_not_there_is_one_line() -> None:
    result = doctor("--device", "xpu")
    assert result.exit_code == 2
    assert "--device xpu: torch sees no such device on this machine" in result.output


def test_a_row_that_cannot_be_written_is_said_before_anything_runs() -> None:
    result = doctor("--json", "/there/is/no/such.jsonl")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--json /there/is/no/such.jsonl: there is no directory /there/is/no" in result.stderr


def test_an_intel_gpu_is_told_by_its_parts(monkeypatch) -> None:
    properties = types.SimpleNamespace(
        name="Arc", architecture=20 << 22 | 1 << 14, gpu_subslice_count=20, gpu_eu_count=160,
        sub_group_sizes=[16, 32], local_mem_size=131072, total_memory=12 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    device_facts.target_of.cache_clear()
    facts = machine(torch.device("xpu"))
    device_facts.target_of.cache_clear()
    assert facts["kind"] == "Intel GPU, xpu_bmg, 160 vector engines"
    assert facts["matrix"] == "DPAS (bf16, fp16); sub-groups of 16, 32"
    assert (facts["shared_memory_bytes"], facts["multiprocessors"]) == (131072, 20)
    assert facts["intel"] is None


def test_what_can_be_built_without_an_intel_gpu_is_said(monkeypatch) -> None:
    assert machine(CPU)["intel"] is None or "xpu_bmg" in machine(CPU)["intel"]
    monkeypatch.setattr(machine_facts, "backend_problem", lambda backend: "")
    monkeypatch.setattr(machine_facts.xpu_code, "missing", lambda: "")
    monkeypatch.setattr(machine_facts.intel_on_cpu, "missing", lambda: "no runtime")
    told = machine(CPU)["intel"]
    assert told.startswith("machine code is built for xpu_pvc, ")
    assert told.endswith("kernels do not run: no runtime")


def test_a_busy_machine_is_said() -> None:
    assert _busy(3.5, 4) == "other processes use 3.5 of 4 cores"
    assert _busy(1.0, 4) is None
    assert _busy(None, 4) is None


def test_a_watch_sees_what_is_chosen_without_it_and_leaves_no_trace() -> None:
    watch, backends = Watch(), dict(window_rows.backends)
    positions, owner = torch.arange(5), torch.zeros(5, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    args, sizes = (positions, owner, table), {"block_size": 64, "window": 4}
    picked, answers = window_rows.explain(*args, **sizes)
    with watch.watching():
        watch.case_id = "one"
        Ops().window_rows(*args, **sizes)
        watch.case_id = "two"
        window_rows(*args, **sizes)
    assert dict(window_rows.backends) == backends
    (calls,) = watch.calls.values()
    assert (calls.family, calls.operation, calls.backend) == ("step_indices", "window_rows", picked)
    assert calls.cases == ["one", "two"]
    before = list(answers)[: list(answers).index(picked)]
    named = "runs only when it is named"
    assert calls.why_not == {name: answers[name].reason or named for name in before}


def test_the_plugins_view() -> None:
    result = doctor("--vllm")
    assert result.exit_code == 0
    assert result.output.startswith("vLLM")
    row = json.loads(doctor("--vllm", "--json", "-").output)
    assert row["part"] == "doctor --vllm"
    assert row["parts"][0]["part"] == "vLLM"


def test_a_part_that_the_plugin_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMLA_VLLM", "embedding")
    result = doctor("--vllm")
    assert result.exit_code != 0
    assert "--vllm: ANYMLA_VLLM must be one of auto, force, off, audit, or parts" in result.stderr
    assert "attention, indexer, compressor, mhc, experts, linears" in result.stderr


def test_a_report_has_every_result_whatever_fails(tmp_path, capsys) -> None:
    steps = [
        [
            "doctor",
            "--device",
            "cpu",
            "--family",
            "step_indices",
            "--json",
            "doctor.json",
        ],
        ["conformance", "--case", "none such"],
        ["conformance", "--backend", "torch", "--case", "L1", "--json", "conformance.jsonl"],
    ]
    file = tmp_path / "report.zip"
    assert not write_report(file, steps)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("1 of 3: anymla doctor --device cpu --family step_indices")
    assert said[3] == "2 of 3: anymla conformance --case none such"
    assert re.fullmatch(r"  \d+ s, exit code 2", said[5])
    assert re.fullmatch(
        rf"{re.escape(str(file))}: \d+ kB; docs/.*\.md says where to send it", said[-1]
    )
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        assert names == {
            "doctor.json", "1-doctor.log", "2-conformance.log", "conformance.jsonl",
            "3-conformance.log", "steps.txt",
        }  # fmt: skip
        codes = [line.split()[0] for line in archive.read("steps.txt").decode().splitlines()]
        assert codes[0] == codes[2] == "0" != codes[1]
        assert json.loads(archive.read("doctor.json"))["ok"] is True
        assert b"L1" in archive.read("3-conformance.log")


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        ("bar  10%\rbar  20%\r", "bar 20%"),
        ("x\n\x1b[2Jy\n", "\\x1b[2Jy"),
        ("a\n" * 9000 + "é" * 300, "é"),
    ],
)
def test_a_terminal_sees_what_a_step_says_last(tmp_path, log, shown) -> None:
    (tmp_path / "log").write_text(log, encoding="utf-8")
    line = _last_line(tmp_path / "log")
    assert line.startswith(shown)
    assert len(line) <= 160
    assert bool(line) == bool(shown)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_the_commands_of_a_report_exist(device: str) -> None:
    steps = report_steps(device)
    assert [words[0] for words in steps] == ["doctor", "conformance", "bench"][
        : 2 + (device != "cpu")
    ]
    for words in steps:
        command: click.Command | None = main
        context, rest = click.Context(main), list(words)
        while isinstance(command, click.Group):
            command = command.get_command(context, rest.pop(0))
        assert command is not None
        command.make_parser(context).parse_args(rest)


@pytest.mark.parametrize("other", ["--no-speed", "--vllm"])
def test_a_report_takes_a_device_alone(tmp_path, other: str) -> None:
    result = doctor("--report", tmp_path / "report.zip", other)
    assert result.exit_code != 0
    assert "only --device" in result.output
