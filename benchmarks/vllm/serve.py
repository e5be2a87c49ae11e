"""Servers with and without the plugin, starts and ``vllm bench serve``: ``serve.py ROWS``.

The servers start at once, and each start is measured to the first answers. A server runs each
point unmeasured as soon as it is ready, so that what they need is compiled; when all are done,
every repeat of a point goes to all of them, one after the other, before the next. Seconds count
from the command to an answer of ``/health``, tokens a second are those that were generated. Each
row is written when it is known, also that a server was not ready in time.

``--caches`` is a folder for compiled kernels with one folder for each server: where it is empty,
the start is a cold one, and a second one with the same is warm. ``--urls`` takes servers that run
already. Requests come from vLLM's own client within this process, whose import takes as long as a
short run, or from a command (``--client "vllm bench serve"``).
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import random_model

HERE = Path(__file__).parent
OUT = sys.stdout  # vLLM's client prints to what is in its place
FIRST_TOKENS = 1024  # of the prompts that a server answers first
# Where kernels are kept, by who compiles them.
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUTE_DSL_CACHE_DIR": "cute",
    "CUDA_CACHE_PATH": "driver",
}
# What is kept of the client's result, by its name in a row.
_KEPT = {
    "ttft_ms": "median_ttft_ms",
    "ttft_p90_ms": "p90_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "tpot_p90_ms": "p90_tpot_ms",
    "tokens_s": "output_throughput",
    "duration_s": "duration",
    "completed": "completed",
}


class Server:
    """A server that serves in one mode.

    Attributes:
        mode: its ``ANYMLA_VLLM``.
        url: without a slash at the end.
        process: None where it was not started here.
        log: of the process.
        began: when it was started, by ``time.monotonic``.
    """

    def __init__(self, mode: str, url: str = "") -> None:
        """Start nothing yet."""
        self.mode, self.url = mode, url
        self.process: subprocess.Popen[bytes] | None = None
        self.log, self.began = Path(os.devnull), time.monotonic()

    def start(self, model: Path, options: argparse.Namespace) -> None:
        """Start the process."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(options.logs) / f"server-{self.mode.replace(',', '-')}{options.label}.log"
        environment = os.environ | {"ANYMLA_VLLM": self.mode}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(HERE), os.environ.get("PYTHONPATH", "")))
        )
        if options.caches:
            for name, folder in _CACHES.items():
                place = (options.caches / self.mode / folder).resolve()
                place.mkdir(parents=True, exist_ok=True)
                environment[name] = str(place)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += server_options(options, warms_up=self.mode != "off")
        with self.log.open("wb") as log:
            self.began = time.monotonic()
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self, seconds: float) -> float:
        """Wait until it is ready; return how many seconds after its start."""
        while time.monotonic() - self.began < seconds:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=10),
            ):
                return time.monotonic() - self.began
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"{self.mode} ended while it started:\n{self.tail()}")
            time.sleep(0.05)
        raise RuntimeError(f"{self.mode} is not ready after {seconds:.0f} s:\n{self.tail()}")

    def first_token(self, seed: int, vocabulary: int) -> float:
        """Milliseconds until a prompt's only token has come."""
        prompt = random_model.prompt(FIRST_TOKENS, seed)["prompt_token_ids"]
        asked: dict[str, Any] = {"model": self.model(), "max_tokens": 1, "temperature": 0}
        asked["prompt"] = [2 + token % (vocabulary - 2) for token in prompt]
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
        return 1e3 * (time.perf_counter() - start)

    def model(self) -> str:
        """Name of the model."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])

    def caches(self, options: argparse.Namespace) -> list[str]:
        """Who has compiled kernels in its folders."""
        found = set()
        for folder in _CACHES.values() if options.caches else ():
            kept = (options.caches / self.mode / folder).rglob("*")
            found |= {folder for each in kept if each.is_file()}
        return sorted(found)

    def leave(self) -> None:
        """End it, and what it has started."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(8)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def server_options(options: argparse.Namespace, *, warms_up: bool) -> list[str]:
    """Arguments of a server.

    Args:
        options: of this script.
        warms_up: let kernels be compiled at the start that registered for it. vLLM's own take ten
            minutes, and are compiled at first use here.
    """
    found = ["--max-model-len", str(max(sum(point) for point in options.points) + 64)]
    found += ["--max-num-seqs", str(options.concurrency), "--max-num-batched-tokens", "8192"]
    found += ["--no-enable-prefix-caching", "--seed", "0"]
    if options.model is None:
        found += ["--load-format", random_model.FORMAT, "--dtype", "bfloat16"]
        found += ["--worker-extension-cls", "in_worker.InWorker"]
        found += ["--gpu-memory-utilization", "0.25"]
        found += ["--kv-cache-memory-bytes", str(options.cache_gib << 30)]
        graphs = {"cudagraph_capture_sizes": options.sizes, "cudagraph_mode": "FULL_DECODE_ONLY"}
        found += ["--compilation-config", json.dumps(graphs)]
        found += ["--kernel-config", json.dumps({"enable_jit_warmup": warms_up})]
    return found + shlex.split(options.more)


def client_options(
    server: Server, point: tuple[int, int], model: Path, seed: int, asked: argparse.Namespace
) -> list[str]:
    """Return arguments for ``vllm bench serve``."""
    tokens, new = point
    return [
        "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", server.model(), "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", str(tokens),
        "--random-output-len", str(new), "--random-range-ratio", "0",
        "--num-prompts", str(asked.prompts), "--max-concurrency", str(asked.concurrency),
        "--seed", str(seed), "--temperature", "0", "--disable-tqdm",
        "--ready-check-timeout-sec", "0",
        "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "90",
    ]  # fmt: skip


def bench(asked: argparse.Namespace, arguments: Sequence[str]) -> dict[str, float]:
    """Run vLLM's client and return what is kept of its result.

    Args:
        asked: options; without ``client``, vLLM's own runs in this process.
        arguments: arguments for ``vllm bench serve``.

    Raises:
        RuntimeError: the command failed, or a server refused requests.
    """
    result = _result(asked.client, arguments)
    if result["completed"] != asked.prompts:
        raise RuntimeError(f"{result['completed']} of {asked.prompts} requests were answered")
    return {name: round(float(result[theirs]), 3) for name, theirs in _KEPT.items()}


def _result(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    if not command:
        from vllm.benchmarks.serve import add_cli_args, main_async
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        return dict(asyncio.run(main_async(parser.parse_args(list(arguments)))))
    with tempfile.TemporaryDirectory() as place:
        saved = ["--save-result", "--result-dir", place, "--result-filename", "result.json"]
        run = subprocess.run(
            [*shlex.split(command), *arguments, *saved], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"{command} failed:\n{run.stderr[-2000:]}")
        return dict(json.loads((Path(place) / "result.json").read_text()))


class Report:
    """A file of rows, to which each is appended when it is known."""

    def __init__(self, asked: argparse.Namespace) -> None:
        """Find out what all rows say."""
        from anymla.bench.environment import environment
        from anymla.bench.gpu import device_facts
        from anymla.engines.vllm.pinned import installed_version

        command = "python benchmarks/vllm/serve.py ROWS " + shlex.join(sys.argv[2:])
        kept = ("layers", "experts", "label", "concurrency", "prompts", "beside")
        options = {name: getattr(asked, name) for name in kept}
        self.common = {"vllm": installed_version(), **environment(command), **device_facts()}
        self.common |= options | {"cores": len(os.sched_getaffinity(0))}
        self.path = asked.rows

    def row(self, part: str, case: str, mode: str, found: dict[str, Any]) -> None:
        """Append a row."""
        row = {"part": part, "case": case} | found | {"backend": mode} | self.common
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_all(
    servers: Sequence[Server], model: Path, asked: argparse.Namespace, report: Report
) -> None:
    """Start the servers that are not, and measure those that answer."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    began = time.monotonic()
    caches = {server.mode: {"caches": server.caches(asked)} for server in servers}

    def answers(server: Server) -> bool:
        if not asked.urls:
            there = caches[server.mode]
            try:
                seconds = round(server.ready(asked.seconds), 1)
                first = [server.first_token(seed, vocabulary) for seed in range(3)]
            except (RuntimeError, OSError) as error:
                waited = {"waited_s": round(time.monotonic() - server.began, 1)}
                report.row("start", "a server, not ready", server.mode, there | waited)
                _say(f"FAILED {server.mode} {asked.label}: {error}")
                return False
            found = {"started_s": seconds, "first_ms": [round(each, 1) for each in first]} | there
            _say(f"start {asked.label} {server.mode:6s} {json.dumps(found)}")
            report.row("start", "a server", server.mode, found)
        try:
            for point in asked.points * asked.unmeasured:
                kept = bench(asked, client_options(server, point, model, 0, asked))
                _say(f"unmeasured {_line(server, point, kept)}")
        except (RuntimeError, OSError) as error:
            _say(f"FAILED {server.mode} {asked.label}: {error}")
            return False
        return True

    for server in servers if not asked.urls else ():
        server.start(model, asked)
    if not asked.client:
        import vllm.benchmarks.serve  # noqa: F401
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        found = list(pool.map(answers, servers))
    alive = [server for server, answer in zip(servers, found, strict=True) if answer]
    left = began + asked.end - time.monotonic() if asked.end else float("inf")
    measure(alive, model, asked, report, min(left, asked.budget or left))


def measure(
    servers: Sequence[Server],
    model: Path,
    asked: argparse.Namespace,
    report: Report,
    seconds: float = float("inf"),
) -> None:
    """Run repeats in turns for so many seconds, and append a row for each run.

    A repeat of a point is left out if it would end too late, were it as long as the one before.
    """
    end = time.monotonic() + seconds
    took: dict[tuple[int, int], float] = {}
    found: dict[tuple[tuple[int, int], str], list[dict[str, float]]] = {}
    for repeat in range(asked.repeats):
        for point in asked.points:
            began = time.monotonic()
            if began + took.get(point, 0) > end:
                continue
            for server in servers if repeat % 2 == 0 else reversed(servers):
                options = client_options(server, point, model, repeat + 1, asked)
                try:
                    kept = bench(asked, options)
                except (RuntimeError, OSError) as error:
                    _say(f"FAILED {server.mode} {point}: {error}")
                    continue
                _say(_line(server, point, kept))
                found.setdefault((point, server.mode), []).append(kept)
                case = f"{point[0]:,} + {point[1]:,} tokens"
                report.row("bench serve", case, server.mode, kept | {"repeat": repeat})
            took[point] = time.monotonic() - began
    _table(found)


def _say(text: str) -> None:
    print(text, file=OUT, flush=True)


def _line(server: Server, point: tuple[int, int], kept: dict[str, float]) -> str:
    return f"{server.mode:6s} {point[0]} + {point[1]}: " + json.dumps(kept)


def _table(found: dict[tuple[tuple[int, int], str], list[dict[str, float]]]) -> None:
    """Print medians, and how far the repeats are apart, of each point and server."""
    for (point, mode), runs in found.items():
        line = f"{point[0]:>6} + {point[1]:<5} {mode:6s} {len(runs)} x"
        for name in ("ttft_ms", "tpot_ms", "tokens_s"):
            values = [run[name] for run in runs]
            middle = statistics.median(values)
            line += f"  {name} {middle:.2f} (+-{(max(values) - min(values)) / middle / 2:.1%})"
        _say(line)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _served(servers: Sequence[Server]) -> Iterator[None]:
    """End the servers afterwards, or at SIGTERM, which ends what waits for their answers."""

    def leave(*_: object) -> None:
        all_leave()
        sys.exit(143)

    def all_leave() -> None:
        with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.leave, servers))

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        all_leave()


def _points(text: str) -> list[tuple[int, int]]:
    return [(int(n), int(new)) for n, new in (point.split("x") for point in text.split(","))]


def _urls(text: str) -> dict[str, str]:
    return {mode: url.rstrip("/") for mode, url in (each.split("=", 1) for each in text.split(" "))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the servers, measure, and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument(
        "--modes", default="off,force", help="modes of the servers to start, parts joined by '+'"
    )
    parser.add_argument(
        "--urls", type=_urls, help='servers that run already: "off=http://... force=http://..."'
    )
    parser.add_argument(
        "--model", type=Path, help="a checkpoint instead of random weights of V4-Flash's sizes"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1, 8], help="requests in captured graphs"
    )
    parser.add_argument("--cache-gib", type=int, default=6)
    parser.add_argument("--caches", type=Path, help="folder for compiled kernels")
    parser.add_argument("--label", default="", help="name of the start in rows, such as cold")
    parser.add_argument("--seconds", type=float, default=600, help="longest time of a start")
    parser.add_argument("--more", default="", help="further arguments for the servers")
    parser.add_argument(
        "--points",
        type=_points,
        default=_points("1024x256,8192x1024"),
        help="prompt and new tokens of each point",
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a run")
    parser.add_argument("--concurrency", type=int, default=8, help="most requests at once")
    parser.add_argument("--unmeasured", type=int, default=1, help="runs of each point before")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=0, help="seconds for all repeats; 0 for no limit"
    )
    parser.add_argument(
        "--end",
        type=float,
        default=0,
        help="seconds after the start of the servers by which repeats end; 0 for no limit",
    )
    parser.add_argument(
        "--client",
        default="",
        help='a command instead of vLLM in this process, such as "vllm bench serve"',
    )
    parser.add_argument("--logs", type=Path, default=Path(), help="folder for the servers' logs")
    parser.add_argument("--beside", default="", help="note on what else runs on the machine")
    asked = parser.parse_args(arguments)
    modes = [mode.replace("+", ",") for mode in asked.modes.split(",")]
    with tempfile.TemporaryDirectory() as place:
        model = asked.model or Path(place)
        if asked.model is None:
            random_model.save(model, asked.experts, asked.layers)
        report = Report(asked)
        servers = [Server(mode) for mode in modes]
        if asked.urls:
            servers = [Server(*each) for each in asked.urls.items()]
        with _served(servers), _silence():
            run_all(servers, model, asked, report)


if __name__ == "__main__":
    main()
