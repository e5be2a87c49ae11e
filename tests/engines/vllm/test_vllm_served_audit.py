"""A server with an audit: its metrics have the audit's counters, and it ends well."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from inputs import prompt_of
from servers import HERE, environment, needs_avx512, needs_vllm, serve

SECONDS = 60


@needs_vllm
@pytest.mark.parametrize("servers", ["one", "several"])
def test_counters_of_other_processes_are_in_vllms_metrics(servers: str) -> None:
    """With one API server, which has no folder for them, and with several, which share one."""
    env = environment("audit")
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "metrics.py"), servers],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, text = done.stdout.split("\n", 1)
    found = _counters(text)
    assert found["anymla_audit_steps_total"] == 5  # of two workers
    assert found["anymla_audit_skipped_total"] == 1
    assert found['anymla_audit_cases_total{method="slots"}'] == 5
    assert found['anymla_audit_alarms_total{method="slots"}'] == 2
    assert found['anymla_audit_alarms_total{method="attention"}'] == 0
    assert found["anymla_kernels_compiled_total"] == 1
    assert not Path(folder).exists()  # it goes with its server


@needs_vllm
@needs_avx512
def test_a_server_counts_its_audit_and_ends_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    """If it may: by default vLLM kills its engine at once."""
    log = tmp_path / "log.txt"
    options = ("--max-model-len", "1024", "--max-num-seqs", "2", "--shutdown-timeout", "60")
    more = {"ANYMLA_AUDIT": "every=2,requests=1"}
    with serve(checkpoint, log, *options, mode="auto,audit", **more) as address:
        words = {"model": str(checkpoint), "prompt": prompt_of(30), "max_tokens": 24}
        words |= {"temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(words).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=SECONDS).read()
        for _ in range(SECONDS):
            text = urllib.request.urlopen(f"{address}/metrics", timeout=SECONDS).read().decode()
            found = _counters(text)
            if found.get('anymla_audit_cases_total{method="attention"}'):
                break
            time.sleep(1)
        assert found["anymla_audit_steps_total"] >= 10
        assert found['anymla_audit_cases_total{method="attention"}'] >= 1
        assert not any(found[name] for name in found if "alarms" in name)
        assert "vllm:num_requests_running" in text
        server = int(re.search(r"\(APIServer pid=(\d+)\)", log.read_text())[1])
        os.kill(server, signal.SIGTERM)
        for _ in range(10 * SECONDS):
            if not Path(f"/proc/{server}").exists() or _is_zombie(server):
                break
            time.sleep(0.1)
    said = log.read_text()
    assert re.search(r"audit: \d+ of \d+ steps, 0 alarms, 0 skipped", said)  # the last summary
    # When its client has shut down, vLLM's API server may still listen to the engine that is gone.
    before, ended, after = said.partition("[shutdown] MPClient: complete")
    assert ended
    after = "\n".join(line for line in after.splitlines() if "async_llm.py" not in line)
    for bad in ("exited unexpectedly", "terminate called", "killing", "Traceback"):
        assert bad not in before + after, said[-4000:]


def _counters(text: str) -> dict[str, float]:
    found = re.findall(r"^(anymla_\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()
