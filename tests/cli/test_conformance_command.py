import json
import math
import os
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from click.testing import CliRunner, Result

from anymla.cli.main import main
from anymla.engines.vllm.answers import EngineFailed, Reply
from anymla.formats.page_layout import MAIN_FP8
from anymla.model.tokenizer import Tokenizer
from anymla.ops.attention import (
    CacheRows,
    prefill_attention_backward,
    sparse_attention,
    sparse_attention_rows,
)
from anymla.ops.device import triton_version
from anymla.testing.conformance.faults.fault import Fault
from anymla.testing.conformance.isolated import Request, run_isolated
from anymla.testing.conformance.registry import NotApplicable, load_cases


def conformance(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["conformance", *map(str, arguments)])


def sinkless(*args, sink=None, **rest):
    return sparse_attention(*args, backend="torch", **rest)


def wide_only(q, *args, **rest):
    if q.shape[1] < 20:
        raise NotApplicable("takes 20 heads or more")
    return sparse_attention(q, *args, backend="torch", **rest)


def dies(*args, **rest):
    os._exit(7)


def hangs(*args, **rest):
    while True:
        pass


def raises(*args, **rest):
    raise RuntimeError("no kernel image is available")


class FakeFlashMla:
    """FlashMLA's own signatures and conventions, on this package's operations."""

    __version__ = "1.0"
    leak = False

    def get_mla_metadata(self):
        return object(), None

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, lens, dim, metadata, splits, scale, causal, fp8, indices,
        sink, *, topk_length=None, extra_k_cache=None, extra_indices_in_kvcache=None,
        extra_topk_length=None,
    ):  # fmt: skip
        assert (block_table, lens, dim, splits, causal, fp8) == (None, None, 512, None, False, True)
        assert q.shape[2] in (64, 128)
        assert indices.shape[2] % 64 == 0
        assert k_cache.stride(0) % 576 == 0
        out, lse = sparse_attention(
            q.squeeze(1),
            [
                CacheRows(k_cache, MAIN_FP8, indices, topk_length),
                CacheRows(extra_k_cache, MAIN_FP8, extra_indices_in_kvcache, extra_topk_length),
            ][: 1 if extra_k_cache is None else 2],
            sink=sink,
            scale=scale,
        )
        return out.unsqueeze(1), torch.where(lse == -math.inf, math.inf, lse).unsqueeze(2)

    def flash_mla_sparse_fwd(self, q, kv, indices, scale, dim, sink, *, topk_length=None):
        assert indices.shape[2] % 128 == 0
        out, lse = sparse_attention_rows(q, kv, indices, topk_length, sink=sink, scale=scale)
        if self.leak:  # a row beyond the length, times a probability of zero
            inside = (indices >= 0) & (indices < len(kv))
            listed = kv[torch.where(inside, indices, 0).long().flatten(), 0]
            out = out + 0 * torch.where(inside.flatten().unsqueeze(1), listed, 0).sum()
        return out, lse, torch.where(lse == -math.inf, math.inf, lse)


class FakeCudnn:
    """cuDNN frontend's signature and conventions; ``delta`` forgets the sink if it is faulty."""

    def __init__(self, *, faulty: bool):
        self.faulty = faulty

    def sparse_attention_backward_wrapper(
        self, q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None
    ):
        assert q.shape[1] in (64, 128)
        assert topk_idxs.shape[1] % 64 == 0
        assert ((topk_idxs >= -1) & (topk_idxs < len(kv))).all()
        ranges = torch.zeros(len(q), 4, dtype=torch.int32)
        ranges[:, 3] = topk_idxs.shape[1]
        if self.faulty:
            out = out * (1 + torch.exp(attn_sink - lse)).unsqueeze(2).to(out.dtype)
        found = prefill_attention_backward(
            dout, q, kv, ranges, topk_idxs, out, lse, window=0, sink=attn_sink,
            scale=softmax_scale, backend="torch",
        )  # fmt: skip
        return dict(zip(("dq", "dkv", "d_sink"), found, strict=True))


def _cudnn_adapter(*, faulty: bool):
    from anymla.testing.conformance.adapters.cudnn_frontend import adapter_of

    return adapter_of(FakeCudnn(faulty=faulty), "fake", needs_gpu=False)


GOOD_CUDNN, FAULTY_CUDNN = _cudnn_adapter(faulty=False), _cudnn_adapter(faulty=True)


def _fake_adapter(leak: bool):
    from anymla.testing.conformance.adapters.flash_mla import adapter_of

    module = FakeFlashMla()
    module.leak = leak
    return adapter_of(module, "fake", needs_gpu=False)


GOOD_FLASH_MLA, LEAKING_FLASH_MLA = _fake_adapter(False), _fake_adapter(True)


def here(attribute: str) -> str:
    return f"{__name__}:{attribute}"


def test_every_case_is_listed_with_its_story() -> None:
    lines = conformance("--list").output.splitlines()
    for line, (case_id, case) in zip(lines, load_cases().items(), strict=True):
        assert line.split()[0] == case_id
        assert case.story in line
    assert lines[0].startswith("L1   index pages hold all values, then all scales")


def test_the_cases_of_a_family_are_those_that_judge_its_operations() -> None:
    listed = conformance("--list", "--family", "indexer").output.splitlines()
    ids = {line.split()[0] for line in listed}
    assert {"I1", "I2"} <= ids < {*load_cases()}
    both = conformance("--list", "--family", "indexer", "--family", "kv_cache").output.splitlines()
    assert {*listed} < {*both}
    result = conformance("--family", "choice")
    assert result.exit_code == 0, result.output
    assert "1 passed, 0 failed" in result.output
    result = conformance("--family", "choice", "--case", "I1")
    assert result.exit_code == 0, result.output
    assert "choice: no case judges an operation of it" in result.output
    result = conformance("--family", "attend")
    assert result.exit_code == 2
    assert "--family attend: there are attention, choice, " in result.output


def test_cases_pass_and_are_written_for_machines(tmp_path) -> None:
    junit, rows = tmp_path / "out.xml", tmp_path / "out.jsonl"
    result = conformance(
        "--backend", "torch", "--case", "A1", "--case", "i4", "--case", "M4", "--junit", junit,
        "--json", rows, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "ok   A1   the sink enters the softmax once" in result.output
    assert "n/a  M4 " in result.output
    assert "torch on cpu: 2 passed, 0 failed, 1 not applicable" in result.output
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "0", "1")
    assert [case.get("name").split()[0] for case in suite] == ["A1", "I4", "M4"]
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["case_id"], row["status"]) for row in written] == [
        ("A1", "passed"),
        ("I4", "passed"),
        ("M4", "not applicable"),
    ]
    assert written[0]["torch"] == torch.__version__


def test_rows_say_that_kernels_were_interpreted(tmp_path) -> None:
    rows = tmp_path / "out.jsonl"
    result = conformance("--backend", "triton", "--case", "C2", "--json", rows, "--device", "cpu")
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["version"] == f"in the interpreter of Triton {triton_version()}"


def test_a_library_that_drops_the_sink_is_shown() -> None:
    words = ("--jobs", 0, "--device", "cpu", "--case", "A1", "--case", "A4")
    result = conformance("--against", here("sinkless") + "=sparse_attention", *words)
    assert result.exit_code == 1
    assert "FAIL A1   the sink enters the softmax once" in result.output
    assert "ok   A4 " in result.output
    assert "1 passed, 1 failed" in result.output


def test_what_a_library_does_not_claim_is_said() -> None:
    words = ("--jobs", 0, "--device", "cpu", "--case", "A3", "--case", "A4", "--case", "C2")
    result = conformance("--against", here("wide_only") + "=sparse_attention", *words)
    assert result.exit_code == 0
    assert "not judged: 6 x sparse_attention: takes 20 heads or more" in result.output
    assert "1 passed, 0 failed, 2 not applicable" in result.output
    assert "has no compressed_rows" in result.output


def counts_threads(*args, **kwargs):
    raise RuntimeError(f"{torch.get_num_threads()} thread(s) in process {os.getpid()}")


def test_a_worker_is_kept_and_computes_with_one_thread(monkeypatch) -> None:
    """As the command does without workers: threads of small calls only wait for each other."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    named = "test_conformance_command:counts_threads=sparse_attention"
    cases = [load_cases()[name] for name in ("A1", "A2", "A4")]
    told = Request(None, named, "cpu", False, ())
    found = run_isolated(cases, told, "counts_threads", jobs=1, timeout_s=300)
    (said,) = {each.detail for each in found}
    assert "1 thread(s) in process " in said


def test_an_exception_is_a_failure() -> None:
    words = ("--jobs", 0, "--device", "cpu", "--case", "A1")
    result = conformance("--against", here("raises") + "=sparse_attention", *words)
    assert result.exit_code == 1
    assert "raised RuntimeError: no kernel image is available" in result.output


def test_a_crash_and_a_hang_are_one_cases_outcome(monkeypatch) -> None:
    """In processes of their own, which find the libraries in this file.

    On a busy machine the first may be slow to die; the second is late whatever the machine does.
    """
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def outcomes(library: str, names: tuple[str, ...], timeout_s: float) -> list[tuple[str, ...]]:
        named = f"test_conformance_command:{library}=sparse_attention"
        cases = [load_cases()[name] for name in names]
        told = Request(None, named, "cpu", False, ())
        found = run_isolated(cases, told, library, jobs=1, timeout_s=timeout_s)
        return [(each.case_id, each.status, each.detail) for each in found]

    lacking = "test_conformance_command:dies=sparse_attention has no compressed_rows"
    assert outcomes("dies", ("A4", "C2"), 300) == [
        ("A4", "failed", "the process ended with 7"),
        ("C2", "not applicable", lacking),
    ]
    assert outcomes("hangs", ("A4",), 3) == [("A4", "failed", "no answer in 3 s")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "cuda"), "--backend cuda: there are"),
        (("--case", "Z9"), "--case Z9: there are L1, L2"),
        (
            ("--against", "nobody"),
            "expected one of flash_mla, deep_gemm, cudnn_frontend, vllm_xpu, compat, or module:",
        ),
        (("--against", "torch:nothing_here"), "has no attribute 'nothing_here'"),
        (("--against", "torch:topk"), "topk is no operation of this package; name one with"),
        (("--against", "no_such_module:f"), "No module named 'no_such_module'"),
        (("--timeout", "-1"), "-1.0 is not in the range x>0"),
        (("--timeout", "0"), "0.0 is not in the range x>0"),
        (("--timeout", "nan"), "must be finite, got nan"),
        (("--write", __file__), "--write goes with --mutations, of all cases"),
        (("--write", __file__, "--mutations", "--case", "A1"), "--write goes with --mutations, of"),
        (("--mutations", "--backend", "torch"), "--mutations goes without --backend"),
        (("--compiled",), "--compiled goes with --backend triton, on a CPU"),
        (("--compiled", "--backend", "torch"), "--compiled goes with --backend triton, on a CPU"),
    ],
)
def test_unusable_words_are_one_line_and_exit_code_2(words, message) -> None:
    result = conformance(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_judging_nothing_is_a_failure() -> None:
    result = conformance("--backend", "torch", "--case", "M4", "--device", "cpu")
    assert result.exit_code == 1
    assert "0 passed, 0 failed, 1 not applicable" in result.stdout
    assert result.stderr == "Error: no case could be judged\n"


def test_mutations_are_of_the_chosen_cases() -> None:
    result = conformance("--mutations", "--case", "A1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    head, rule, *rows = result.stdout.splitlines()
    assert (head, rule) == ("| fault | in | caught by |", "|---|---|---|")
    assert any(row.endswith("| A1 |") for row in rows)
    assert {row.split("|")[3].strip() for row in rows} <= {"A1", "**nothing**"}
    nothing = conformance("--mutations", "--case", "M4", "--device", "cpu")
    assert nothing.exit_code == 1
    assert "no fault is meant for" in nothing.stderr


def test_a_fault_that_its_case_does_not_notice_is_a_failure(monkeypatch) -> None:
    faults = [Fault("harmless", ("A1",), "sparse_attention", sparse_attention)]
    monkeypatch.setattr("anymla.testing.conformance.mutations.load_faults", lambda: faults)
    result = conformance("--mutations", "--case", "A1", "--device", "cpu")
    assert result.exit_code == 1
    assert "| harmless | `sparse_attention` | **nothing** |" in result.stdout
    assert result.stderr == "Error: not noticed: harmless\n"


def test_a_library_with_flash_mlas_conventions_passes() -> None:
    chosen = [word for name in ("A1", "A2", "A10", "I9", "L3", "L6") for word in ("--case", name)]
    result = conformance(
        "--against", here("GOOD_FLASH_MLA"), "--jobs", 0, "--device", "cpu", *chosen
    )
    assert result.exit_code == 0, result.output
    assert "6 passed" in result.output
    assert "fake: the adapter translates" in result.output


def test_gradients_of_another_library_are_judged() -> None:
    chosen = [word for number in range(1, 10) for word in ("--case", f"T{number}")]
    words = ("--jobs", 0, "--device", "cpu", *chosen)
    result = conformance("--against", here("GOOD_CUDNN"), *words)
    assert result.exit_code == 0, result.output
    assert "3 passed, 0 failed" in result.output
    assert "has no deterministic gradients" in result.output
    result = conformance("--against", here("FAULTY_CUDNN"), *words)
    assert result.exit_code == 1
    assert "ordinary sink: dq is off by" in result.output


def test_a_nan_row_beyond_the_length_is_shown() -> None:
    words = ("--jobs", 0, "--device", "cpu", "--case", "L6")
    result = conformance("--against", here("LEAKING_FLASH_MLA"), *words)
    assert result.exit_code == 1
    assert "plain rows, NaN behind the lengths: out: 4096 of 4096 elements differ in being NaN" in (
        result.output
    )


def test_the_compatible_names_pass_what_they_are_judged_by() -> None:
    names = ("A1", "A2", "A10", "L1", "L3", "L6", "C3", "I2", "I6", "I8")
    chosen = [word for name in names for word in ("--case", name)]
    result = conformance("--against", "compat", "--jobs", 0, "--device", "cpu", *chosen)
    assert result.exit_code == 0, result.output
    assert "0 failed, 0 not applicable" in result.output
    assert "reads v4_index_fp8 only" in result.output  # L1 also asks for MXFP4 keys


class FakeXpu:
    """The signature of vLLM's decode for XPU, which takes the sink and does not use it."""

    @staticmethod
    def xpu_sparse_decode_fp8(
        *, q, kv_cache, swa_kv_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
        attn_sink, softmax_scale, head_dim, nope_head_dim, rope_head_dim, out,
    ):  # fmt: skip
        assert (head_dim, nope_head_dim, rope_head_dim) == (512, 448, 64)
        assert (kv_cache is None) == swa_only
        assert len(attn_sink) == q.shape[1]
        sparse_attention(
            q,
            [
                CacheRows(swa_kv_cache, MAIN_FP8, swa_indices, swa_lens),
                CacheRows(kv_cache, MAIN_FP8, topk_indices, topk_lens),
            ][: 1 if swa_only else 2],
            scale=softmax_scale,
            out=out,
        )


def test_vllms_path_is_shown_dropping_the_sink(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "xpu_sparse_decode_fp8", FakeXpu)
    words = ("--jobs", 0, "--device", "cpu", "--case", "A1", "--case", "A2", "--case", "A5")
    result = conformance("--against", "vllm_xpu", *words)
    assert result.exit_code == 1
    assert "FAIL A1 " in result.output
    assert "n/a  A2   lse: natural log, sink excluded" in result.output
    assert "returns no lse" in result.output
    assert "ok   A5 " in result.output


def test_libraries_that_need_a_gpu_say_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", FakeFlashMla())
    result = conformance("--against", "flash_mla", "--device", "cpu")
    assert result.exit_code == 2
    assert "flash_mla runs on CUDA tensors" in result.output


TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"


def _end_to_end(*arguments):
    words = ["conformance", "--end-to-end", TINY / "checkpoint", "--text", TINY / "persuasion.txt"]
    return CliRunner().invoke(main, list(map(str, [*words, *arguments])))


def test_passkeys_are_found_end_to_end(tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = ("--length", 512, "--length", 1024, "--depth", 0, "--depth", 0.5)
    result = _end_to_end(*sizes, "--faults", "--json", out)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "passkeys in persuasion.txt, at depths 0 0.5: + found, - not"
    found = {line[:22].strip(): line[22:].strip() for line in lines[1:6]}
    assert found["512 tokens"] == "+ +"
    assert "-" in found["stale index rows"]
    assert lines[6].split() == ["1024", "tokens", "+", "+"]
    assert lines[11] == "log-probabilities of the text itself, 1024 tokens, in float32"
    said = {line[:22].strip(): float(line[22:].split()[0]) for line in lines[12:]}
    assert list(said) == ["none", "bfloat16", "sink dropped", "window off by one"]
    assert all(3 < nats < 4 for nats in said.values())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 5 + 4
    assert rows[-1]["fault"] == "window off by one"
    assert 0 < rows[-1]["typical"] < rows[-1]["largest"]
    assert {"length", "depth", "fault", "found", "text", "confidence"} <= set(rows[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "flash_mla"), "--end-to-end goes with"),
        (("--length", 10**6), "tokens cannot be made 1000000"),
        (("--engine", "vllm", "--faults"), "--engine vllm goes without --faults"),
    ],
)
def test_end_to_end_refuses(arguments, message):
    result = _end_to_end(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_end_to_end_needs_a_text():
    result = CliRunner().invoke(main, ["conformance", "--end-to-end", str(TINY)])
    assert result.exit_code == 2
    assert "--end-to-end and --text go together" in result.stderr


def test_vllm_is_asked_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("anymla.cli.end_to_end.installed_version", lambda: None)
    result = _end_to_end("--engine", "vllm")
    assert result.exit_code == 2
    assert "vLLM is not installed here" in result.stderr


def test_an_engine_that_fails_says_its_last_words(monkeypatch):
    def fails(*_, **__):
        raise EngineFailed("vLLM ended with 1: ...no memory")

    monkeypatch.setattr("anymla.cli.end_to_end.installed_version", lambda: "0.32.0")
    monkeypatch.setattr("anymla.cli.end_to_end.answers", fails)
    result = _end_to_end("--engine", "vllm", "--length", 512, "--depth", 0)
    assert result.exit_code == 1
    assert "no memory" in result.stderr
    assert "padded for vLLM: num_experts_per_tok 8, n_routed_experts 64" in result.stdout


@pytest.mark.parametrize(("said", "status"), [("right", 0), ("wrong", 1)])
def test_what_vllm_says_is_judged(monkeypatch, tmp_path, said, status):
    """On a GPU both modes are asked; here their answers are given."""
    tokenizer = Tokenizer.from_dir(TINY / "checkpoint")
    modes = []

    def reply(served, prompts, *, mode, **_):
        modes.append(mode)
        assert (served / "config.json").exists()
        text = tokenizer.decode(prompts[0])
        digits = text.partition("passkey is ")[2][:6]
        wrong = said == "wrong" and mode == "force"
        return [Reply(tuple(tokenizer.encode("no" if wrong else digits, leading=False)), (-0.1,))]

    monkeypatch.setattr("anymla.cli.end_to_end.installed_version", lambda: "0.32.0")
    monkeypatch.setattr("anymla.cli.end_to_end.answers", reply)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    facts = {"device": "NVIDIA H200"}
    monkeypatch.setattr("anymla.cli.end_to_end.device_facts", lambda: facts)
    rows = tmp_path / "rows.jsonl"
    result = _end_to_end("--engine", "vllm", "--length", 512, "--depth", 0, "--json", rows)
    assert result.exit_code == status, result.output
    assert modes == ["off", "force"]
    marks = [line.split()[-1] for line in result.stdout.splitlines() if line[:3] == "512"]
    assert marks == ["+", "-" if status else "+"]
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert all(row["device"] == "NVIDIA H200" for row in written)
    engines = [row["engine"] for row in written]
    assert engines == ["vLLM 0.32.0 alone", "vLLM 0.32.0 with the plugin"]
