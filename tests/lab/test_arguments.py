"""Arguments of ``python -m lab`` that name what there is not, or leave nothing to measure."""

import click
import pytest
from click.testing import CliRunner

from anymla.bench.report import Result
from anymla.cli.bench_rows import LAB, command_line
from anymla.cli.main import main as anymla
from anymla.ops.registry import BackendUnavailable
from lab.__main__ import main


def bench(*arguments: str):
    if arguments[0] == "gpu":
        return CliRunner().invoke(anymla, ["bench", *arguments])
    return CliRunner().invoke(main, arguments)


def refused(result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr == f"Error: {message}\n"
    assert result.stdout == ""


@pytest.fixture
def no_device(monkeypatch):
    """Fail where a command asks for the GPU before it has looked at its arguments."""

    def asked() -> bool:
        raise AssertionError("the GPU was asked for first")

    monkeypatch.setattr("torch.cuda.is_available", asked)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("attention --heads 7", "--heads 7: no case is of that; there are 8, 16, 32, 64, 128"),
        ("attention --v32 --heads 64", "--heads 64: no case is of that; there are 128"),
        (
            "attention --fused-end --heads 7 --heads 8",
            "--heads 7 --heads 8: no case is of that; there are 16, 64, 128",
        ),
        (
            "attention --backend foo",
            "--backend foo: there are gluon_sm90, triton, torch, reference",
        ),
        ("prefill --backend foo", "--backend foo: there are gluon_sm90, triton, torch, reference"),
        ("indexer --backend torch", "--backend torch: there are triton, gluon_sm90"),
        (
            "indexer --shapes decode --most-keys 64",
            "--shapes decode --most-keys 64: no case is of that; "
            "there are 2048, 8192, 32768, 262144",
        ),
        (
            "gpu --family foo",
            "--family foo: there are attention, cache, decoder, engram, indexer, layer",
        ),
        ("model --layers 44", "--layers 44: flash has 43"),
        (
            "attention --v32 --fused-end",
            "one of --vllm-xpu, --ampere, --v32, --v41, --fused-end, --verification and --random",
        ),
        ("attention --seed 3", "--seed 3: is of --random"),
        ("attention --vllm-xpu --backend torch", "--backend torch: --vllm-xpu is of triton"),
        (
            "attention --v32 --planned",
            "--planned is of the comparison without --vllm-xpu, --ampere, --v32, --v41, "
            "--fused-end and --verification",
        ),
        ("attention --ampere --backend torch", "--backend torch: --ampere is of triton"),
        ("attention --ampere --heads 7", "--heads 7: no case is of that; there are 8, 16, 64, 128"),
        (
            "attention --ampere --flash-mla",
            "--ampere is next to engines for Ampere alone, not --flash-mla",
        ),
        (
            "attention --vllm-xpu --flash-mla",
            "--vllm-xpu is next to vLLM's path alone, not --flash-mla",
        ),
        (
            "report --figure headline",
            "--figure chooses among the plots of --svg, which is not given",
        ),
        ("report", "one of --svg and --tables is needed"),
    ],
)
def test_what_selects_nothing_is_refused_before_the_gpu_is_asked_for(words, message):
    refused(bench(*words.split()), message)


def test_builds_that_there_are_not_are_refused(tmp_path):
    output = tmp_path / "record.jsonl"
    targets = "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, sm_121, gfx942, gfx950, gfx1151, gfx1201"
    message = f"--target foo: there are {targets}"
    refused(bench("same-code", "record", str(output), "--target", "foo"), message)
    intel = "xpu_pvc, xpu_dg2, xpu_bmg, xpu_lnl, xpu_ptl, xpu_cri"
    refused(bench("build-matrix", "--target", "foo"), f"{message}, {intel}")
    nothing = bench("same-code", "record", str(output), "--module", "foo", "--module", "bar")
    refused(nothing, "--module foo --module bar: no builds are of that")
    assert not output.exists()


@pytest.mark.parametrize(
    "words", ["attention", "experts", "gpu", "indexer", "layer", "linear", "model", "prefill"]
)
def test_a_machine_without_a_gpu_is_one_line(monkeypatch, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(bench(words), "torch sees no GPU on this machine")


@pytest.fixture
def device(monkeypatch):
    """A machine that says that it has a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("anymla.bench.gpu.device_facts", dict)


@pytest.mark.usefixtures("device")
def test_a_benchmark_without_a_result_is_no_success(monkeypatch):
    monkeypatch.setattr("anymla.bench.runner.ceilings", lambda *_, **__: iter(()))
    monkeypatch.setattr("lab.cases.linear.cases", lambda *_: iter(()))
    refused(bench("linear"), "nothing was measured")


@pytest.mark.usefixtures("device")
def test_a_backend_that_cannot_run_here_is_one_line(monkeypatch):
    def ceilings(*_, **__):
        yield Result("device", "small", {"us": 1.0})
        raise BackendUnavailable("gluon_sm90: not on this device")

    monkeypatch.setattr("anymla.bench.runner.ceilings", ceilings)
    result = bench("linear")
    assert result.exit_code == 2
    assert result.stderr == "Error: gluon_sm90: not on this device\n"
    assert "small" in result.stdout


def test_traffic_that_ends_with_the_warm_up_is_no_success(monkeypatch):
    monkeypatch.setattr("lab.traffic.run", lambda *_, **__: iter(()))
    refused(
        bench("traffic", "--device", "cpu", "--seconds", "0.001"),
        "--seconds 0.001: over with the warm-up",
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("words", "option", "titles"),
    [
        ("attention --flash-mla", "--flash-mla", ["FlashMLA", "sgl-flash-mla"]),
        ("attention --vllm-xpu", "--vllm-xpu", ["vLLM's path for XPU"]),
        (
            "attention --ampere",
            "--ampere",
            ["deepseek-v4-flash-0731-sm80", "deepseek-v4-sm80", "deepseek-v4-a100-sglang"],
        ),
        ("prefill --flash-mla", "--flash-mla", ["FlashMLA", "sgl-flash-mla"]),
        ("layer --others", "--others", ["sgl-flash-mla", "FlashMLA"]),
        (f"indexer --topk-library {__file__}", "--topk-library", ["DeepGEMM"]),
    ],
)
def test_a_peer_that_is_not_here_is_one_line_that_says_why(monkeypatch, words, option, titles):
    monkeypatch.setattr("lab.peers.Peer._found", (None, "lib: No module named 'lib'"))
    reasons = [f"{title} cannot be imported (lib: No module named 'lib')" for title in titles]
    refused(bench(*words.split()), f"{option}: {'; '.join(reasons)}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("bench attention --heads 8 --json /tmp/rows.jsonl", "bench attention --heads 8"),
        ("bench indexer --json=/a/b --topk-library /a/b/c.so", "bench indexer --topk-library c.so"),
        ("bench indexer --topk-library=/a/b/c.so", "bench indexer --topk-library=c.so"),
    ],
)
def test_a_row_says_the_command_without_the_machines_folders(monkeypatch, given, said):
    monkeypatch.setattr("sys.argv", ["/usr/bin/anymla", *given.split()])
    assert command_line() == f"anymla {said}"
    monkeypatch.setattr("sys.argv", ["/checkout/lab/__main__.py", *given.split()[1:]])
    with click.Context(main, info_name=LAB):
        assert command_line() == f"python -m lab {said.removeprefix('bench ')}"


def test_an_old_name_says_the_new_one_and_runs_it(monkeypatch):
    words = ["bench", "linear", "--tokens", "0"]
    monkeypatch.setattr("sys.argv", ["anymla", *words])
    done = CliRunner().invoke(anymla, words)
    assert done.exit_code == 2
    assert done.stderr.startswith("anymla bench linear is now python -m lab linear\n")
    assert "--tokens" in done.stderr.splitlines()[-1]
    shown = CliRunner().invoke(anymla, ["bench", "same-code", "compare", "--help"])
    assert (shown.exit_code, "BEFORE AFTER" in shown.stdout) == (0, True)


def test_without_a_checkout_an_old_name_says_where_the_new_one_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused(
        CliRunner().invoke(anymla, ["bench", "layer"]),
        "it is now python -m lab layer, which a checkout of the repository has, not a wheel",
    )
