"""Processes that the tests start: vLLM offline, vLLM's server, transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anymla.engines.vllm.pinned import installed_version

HERE = Path(__file__).parent
needs_vllm = pytest.mark.skipif(
    installed_version() is None,
    reason="vLLM is not installed here; `make test-vllm` has an environment with it",
)
# Without AVX-512 vLLM loads a build that lacks operations of its own DeepSeek-V4 (hash_topk_cpu,
# hc_pre_fused_cpu): neither stock nor with the plugin does a step run.
_CPU = Path("/proc/cpuinfo")
needs_avx512 = pytest.mark.skipif(
    _CPU.exists() and "avx512f" not in _CPU.read_text(),
    reason="vLLM's CPU build runs DeepSeek-V4 with AVX-512 only, which this machine lacks",
)
needs_worker = [needs_vllm, needs_avx512]
SOURCE = "ANYMLA_VLLM_SOURCE"  # folder of another version's package ``vllm``: a wheel, unpacked
needs_source = pytest.mark.skipif(
    not os.environ.get(SOURCE), reason=f"{SOURCE} names no folder of another vllm"
)
START_SECONDS = 400  # of a server; it takes about 40 on two idle cores


@dataclasses.dataclass(frozen=True)
class Run:
    """What ``generate.py`` is asked.

    Attributes:
        prompts: token ids.
        new_tokens: generated after each, greedily.
        ranks: tensor parallel size.
        plain: run the prompts with anymla alone.
        compare: run the prompts (again) with each layer beside vLLM's own kernels.
        score: log-probabilities of the prompt's tokens, too.
        backend: of anymla's operations.
        mode: ANYMLA_VLLM.
        record: file for the first steps that are compared, or None.
        unwritten: of each prompt the positions [first, end) whose index keys are not written in a
            run of its own, before all others; None for no such run.
        engine: more of vLLM's arguments.
    """

    prompts: list[list[int]]
    new_tokens: int = 64
    ranks: int = 1
    plain: bool = True
    compare: bool = False
    score: bool = False
    backend: str | None = None
    mode: str = "auto"
    record: str | None = None
    unwritten: list[tuple[int, int]] | None = None
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)


def environment(mode: str, **more: str) -> dict[str, str]:
    """Of a vLLM process: nothing is fetched, one thread a rank, a small cache."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return inherited | {
        "ANYMLA_VLLM": mode,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        **more,
    }


def generate(run: Run, checkpoint: Path, directory: Path, seconds: int = 600) -> dict[str, Any]:
    """The answer of ``generate.py``, with the run's log under "log"."""
    request, answer = directory / "request.json", directory / "answer.json"
    request.write_text(json.dumps(dataclasses.asdict(run) | {"checkpoint": str(checkpoint)}))
    more = {"TRITON_INTERPRET": "1"} if run.backend == "triton" else {}
    command = [sys.executable, str(HERE / "generate.py"), str(request), str(answer)]
    log = finish(command, environment(run.mode, **more), directory / "log.txt", seconds)
    return json.loads(answer.read_text()) | {"log": log}


def score_with_transformers(checkpoint: Path, prompt: list[int], directory: Path) -> dict[str, Any]:
    """The answer of ``score_hf.py``: log-probabilities of the prompt by dtype."""
    request, answer = directory / "prompt.json", directory / "scores.json"
    request.write_text(json.dumps(prompt))
    command = [sys.executable, str(HERE / "score_hf.py"), str(checkpoint), str(request)]
    finish([*command, str(answer)], environment("off"), directory / "hf.txt", 300)
    return json.loads(answer.read_text())


def look_up(
    script: str, directory: Path, mode: str, *arguments: str, source: Path | None = None
) -> dict[str, Any]:
    """The answer of a script that imports vLLM, which warns and patches torch.

    Args:
        script: of this folder; it is given the file for its answer, and the arguments.
        directory: for its answer and its log.
        mode: ANYMLA_VLLM.
        arguments: of the script.
        source: folder of another version's package ``vllm``, which is imported instead.
    """
    answer, env = directory / "answer.json", environment(mode)
    if source is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(source.parent), env["PYTHONPATH"]])
    command = [sys.executable, str(HERE / script), str(answer), *arguments]
    finish(command, env, directory / "log.txt", 300)
    return json.loads(answer.read_text())


def finish(command: list[str], env: dict[str, str], log: Path, seconds: int) -> str:
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        finally:
            _stop(process)
    text = log.read_text()
    assert status == 0, f"{' '.join(command)} ended with {status}:\n{text[-6000:]}"
    return text


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started, which are in its session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return


@contextlib.contextmanager
def serve(
    checkpoint: Path, log: Path, *options: str, mode: str = "auto", **more: str
) -> Iterator[str]:
    """``vllm serve`` on a free port of this machine; yields its address once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / "vllm_command.py"), "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            env=environment(mode, **more),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(START_SECONDS):
                assert process.poll() is None, log.read_text()[-6000:]
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                time.sleep(1)
            else:
                raise AssertionError(f"not healthy after {START_SECONDS} s: {log.read_text()}")
            yield address
        finally:
            _stop(process)
