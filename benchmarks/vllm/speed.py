"""vLLM's engine with and without the plugin, in turns: ``speed.py ROWS [--help]``.

Each mode has a process of its own; they start together and measure one after the other, every
repeat of a case in all modes before the next. A decode step's context lies in pages that are filled
with random rows, so that long ones need no prefill; that of DeepSeek-V4.1 (``--model``) is
computed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODES = ("off", "force")
_EXPERTS = "@ep"  # behind a mode: experts are shared out whole
_DECODE = "1x1024,8x1024,32x1024,128x1024,1x32768,8x32768,32x32768,128x32768,1x262144,8x262144"
_MORE_STEPS = 64  # in which requests that come at once have begun, beside one for each
_BESIDE = 8192  # tokens before requests that decode while others join


class Server:
    """One engine in one mode; methods are called by name from the parent."""

    def __init__(self, mode: str, options: argparse.Namespace) -> None:
        """Build the engine, compile, capture graphs."""
        os.environ["ANYMLA_VLLM"], _, experts = mode.partition(_EXPERTS)
        import random_model

        start = time.perf_counter()
        computed = options.model == random_model.V41
        self.prompt, self.filled = random_model.prompt, None if computed else _Filled()
        requests, contexts = zip(*options.decode, strict=True)
        beside = (_BESIDE, *options.joining) if options.joining else ()
        traffic = (round(float(spec.split(":")[2])) for spec in options.traffic)
        context = max(*contexts, *options.prompts, *beside, *traffic)
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sorted(set(requests))}
        compilation["cudagraph_mode"] = options.graphs
        self.llm = random_model.engine(
            experts=options.experts,
            layers=options.layers,
            share=options.share,
            model=options.model,
            tensor_parallel_size=options.gpus,
            enable_expert_parallel=bool(experts),
            max_model_len=context + 1024,
            max_num_seqs=max(requests) + 8,  # some join
            # Where contexts are computed, those that decode leave room for whole prompts.
            max_num_batched_tokens=8192 + 64 * computed,
            gpu_memory_utilization=options.memory or 0.9 / len(options.modes),
            kv_cache_memory_bytes=options.cache_gib << 30,
            compilation_config=compilation,
            kv_transfer_config=None if computed else _Filled.SETTINGS,
            kernel_config={  # vLLM's own takes ten minutes
                "enable_jit_warmup": not mode.startswith("off") and not options.no_rehearsal
            },
            disable_log_stats=True,
        )
        self.engine, self.number, self.running = self.llm.llm_engine, 0, []
        self.started = time.perf_counter() - start

    def info(self) -> dict[str, Any]:
        """Of the device and the start."""
        from anymla.bench.gpu import device_facts

        memory = self._in_worker("memory")
        return {"start_s": self.started, "memory_gib": memory / 2**30} | device_facts()

    def compiles(self) -> list[str]:
        """Kernels that Triton has compiled since the last call."""
        return list(self._in_worker("compiled"))

    def _in_worker(self, name: str, *args: Any) -> Any:
        """What the first worker's ``InWorker`` answers; all of them are asked."""
        return self.llm.collective_rpc(f"bench_{name}", args=args)[0]

    def _add(self, length: int, new: int, seed: int = 0) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.number += 1
        asked = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.engine.add_request(str(self.number), self.prompt(length, seed), asked)
        return str(self.number)

    def _step(self) -> dict[str, int]:
        """Tokens that each request got."""
        return {o.request_id: sum(len(c.token_ids) for c in o.outputs) for o in self.engine.step()}

    def begin(self, requests: int, context: int) -> None:
        """Requests that decode after a context, which nobody computed if pages are filled."""
        with self.filled.active() if self.filled else contextlib.nullcontext():
            self.running = [self._add(context, 900, seed) for seed in range(requests)]
            seen: set[str] = set()
            for _ in range(requests + _MORE_STEPS):
                seen |= self._step().keys()
                if len(seen) == requests:
                    break
            else:
                raise RuntimeError(f"{len(seen)} of {requests} requests fit in the cache's pages")
        for _ in range(6):
            self._step()

    def spin(self) -> float:
        """Milliseconds of a loop in Python: some hosts' cores change their speed by half."""
        start = time.perf_counter()
        for _ in range(100_000):
            pass
        return 1e3 * (time.perf_counter() - start)

    def steps(self, count: int) -> float:
        """Median time of a decode step in ms."""
        gaps = []
        for _ in range(count):
            start = time.perf_counter()
            self._step()
            gaps.append(time.perf_counter() - start)
        return 1e3 * statistics.median(gaps)

    def profile(self, count: int) -> dict[str, Any]:
        """Device time of a decode step: in which it is busy, and by parts, in us."""
        self._in_worker("profile")
        for _ in range(count):
            self._step()
        return dict(self._in_worker("profiled", count))

    def end(self) -> None:
        """Let the requests go."""
        self.engine.abort_request(self.running)
        self.running = []
        while self.engine.has_unfinished_requests():
            self._step()

    def first_token(self, requests: int, length: int, seed: int) -> float:
        """Milliseconds until the last of requests that come at once has its first token."""
        start = time.perf_counter()
        new = [self._add(length, 2, seed + i) for i in range(requests)]
        seen: set[str] = set()
        while len(seen) < requests:
            seen |= self._step().keys()
        took = time.perf_counter() - start
        self.running = new
        self.end()
        return 1e3 * took

    def first_use(self, decode: list[tuple[int, int]], prompts: list[tuple[int, int]]) -> None:
        """Run each case once, so that what it needs is compiled."""
        for requests, context in decode:
            self.begin(requests, context)
            self.end()
        for requests, length in prompts:
            self.first_token(requests, length, 998)

    def profile_prompts(self, requests: int, length: int, seed: int) -> dict[str, Any]:
        """Device time until the last of prompts that come at once has its first token, in us."""
        self._in_worker("profile")
        self.first_token(requests, length, seed)
        return dict(self._in_worker("profiled", 1))

    def timeline(self, length: int, seed: int) -> dict[str, Any]:
        """When the host and the device leave each half of a layer of a prompt's step, in ms.

        Also the time of Python's collector, and how often memory was asked of the driver.
        """
        import gc

        import random_model
        import torch

        marks: list[tuple[str, float, Any]] = []
        collected: list[float] = []

        def leave(name: str) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, time.perf_counter(), event))

        def collector(phase: str, _: Any) -> None:
            collected.append(time.perf_counter() * (1 if phase == "stop" else -1))

        hooks = []
        for number, layer in enumerate(random_model.model_of(self.llm).model.layers):
            for name, module in (("attention", layer.attn), ("experts", layer.ffn)):
                label = f"{number} {name}"
                hooks.append(module.register_forward_hook(lambda *_, label=label: leave(label)))
        gc.callbacks.append(collector)
        torch.cuda.synchronize()
        asked = torch.cuda.memory_stats()["num_device_alloc"]
        leave("start")
        took = self.first_token(1, length, seed)
        torch.cuda.synchronize()
        gc.callbacks.remove(collector)
        for hook in hooks:
            hook.remove()
        (_, start, first), last = marks[0], len(hooks) + 1  # of the first step alone
        return {
            "ms": took,
            "left": [(n, 1e3 * (t - start), first.elapsed_time(e)) for n, t, e in marks[1:last]],
            "collector_ms": 1e3 * sum(collected),
            "allocations": torch.cuda.memory_stats()["num_device_alloc"] - asked,
        }

    def joining(self, length: int, seed: int) -> tuple[float, float]:
        """A prompt joins requests that decode: ms to its first token, and their median step."""
        start, gaps, last = time.perf_counter(), [], time.perf_counter()
        new = self._add(length, 1, seed)
        while True:
            got = self._step()
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
            if new in got:
                return 1e3 * (last - start), 1e3 * statistics.median(gaps)

    def traffic(self, count: int, rate: float, length: int, new: int, seed: int) -> dict[str, Any]:
        """Requests that arrive at random: tokens a second, times to first tokens and between."""
        numbers, at = random.Random(seed), 0.0
        arrivals = []
        for _ in range(count):
            at += numbers.expovariate(rate)
            arrivals.append(at)
        start = time.perf_counter()
        first: dict[str, float] = {}
        came: dict[str, float] = {}
        done: dict[str, int] = collections.Counter()
        tokens, waiting, gaps, last = 0, list(arrivals), [], start
        while waiting or self.engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while waiting and waiting[0] <= now:
                came[self._add(length, new, seed + len(waiting))] = waiting.pop(0)
            if not self.engine.has_unfinished_requests():
                time.sleep(0.0005)
                continue
            got = self._step()
            now = time.perf_counter()
            for name, more in got.items():
                first.setdefault(name, now - start)
                done[name] += more
                tokens += more
            if got:
                gaps.append(now - last)
            last = now
        waits = sorted(first[name] - came[name] for name in first)
        return {
            "tokens_s": tokens / (time.perf_counter() - start),
            "ttft_ms": 1e3 * statistics.median(waits),
            "ttft_p90_ms": 1e3 * waits[int(0.9 * len(waits))],
            "itl_ms": 1e3 * statistics.median(gaps),
        }


class _Filled:
    """vLLM's connector for decode benchmarks, active where it is asked for; see ``in_worker``."""

    SETTINGS = {  # noqa: RUF012
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
    }

    def __init__(self) -> None:
        """Of the scheduler in this process."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

        self._on = False
        scheduler: Any = module.DecodeBenchConnectorScheduler
        count = scheduler.get_num_new_matched_tokens
        scheduler.get_num_new_matched_tokens = lambda this, request, computed: (
            count(this, request, computed) if self._on else (0, False)
        )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Requests that are added inside have contexts that are filled."""
        self._on = True
        try:
            yield
        finally:
            self._on = False


def serve(connection: Any, mode: str, options: argparse.Namespace, log: str) -> None:
    """A child: answers (method, arguments) with ("ok", result) or ("failed", traceback)."""
    cores, share = sorted(os.sched_getaffinity(0)), options.modes.index(mode)
    each = len(cores) // len(options.modes)  # so that no thread of another mode is in the way
    os.sched_setaffinity(0, cores[share * each : (share + 1) * each])
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        server: Any = None
        while True:
            name, arguments = connection.recv()
            if name == "leave":
                return
            try:
                if name == "start":
                    server, result = Server(mode, options), None
                else:
                    result = getattr(server, name)(*arguments)
                connection.send(("ok", result))
            except Exception:
                connection.send(("failed", traceback.format_exc()[-3000:]))


class Child:
    """A mode's process."""

    def __init__(self, mode: str, options: argparse.Namespace) -> None:
        """Start it; the engine starts with ``send``."""
        spawn = multiprocessing.get_context("spawn")
        self.mode, (self.pipe, theirs) = mode, spawn.Pipe()
        log = f"{options.logs}/{mode.replace(',', '-')}.log"
        # Not a daemon, which has no children: vLLM has a worker for each GPU.
        self.process = spawn.Process(target=serve, args=(theirs, mode, options, log))
        self.process.start()

    def send(self, name: str, *arguments: Any) -> None:
        """Ask for something."""
        self.pipe.send((name, arguments))

    def result(self) -> Any:
        """Wait for its answer."""
        state, result = self.pipe.recv()
        if state != "ok":
            raise RuntimeError(f"{self.mode}: {result}")
        return result

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Ask and wait."""
        self.send(name, *arguments)
        return self.result()

    def leave(self) -> None:
        """End it, and its workers with it."""
        with contextlib.suppress(OSError):
            self.send("leave")
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


class Report:
    """Writes a row for every mode, and a line to read."""

    def __init__(self, options: argparse.Namespace, children: list[Child]) -> None:
        """Ask the children for the device."""
        from anymla.bench.environment import environment
        from anymla.engines.vllm.pinned import installed_version

        self.path, self.children = Path(options.rows), children
        command = "python benchmarks/vllm/speed.py ROWS " + " ".join(sys.argv[2:])
        self.common = environment(command.strip()) | {"vllm": installed_version()}
        self.facts = {child.mode: child("info") for child in children}
        for mode, facts in self.facts.items():
            print(mode, {k: round(facts.pop(k), 1) for k in ("start_s", "memory_gib")}, flush=True)

    def row(self, part: str, case: str, found: dict[str, dict[str, Any]], key: str) -> None:
        """``found`` by mode; ``key`` names the repeated number that is compared."""
        first = statistics.median(found[self.children[0].mode][key])
        line = f"{part:16s} {case:34s}"
        with self.path.open("a") as file:
            for child in self.children:
                values = found[child.mode]
                row = {"part": part, "case": case, **values, "backend": child.mode}
                file.write(json.dumps(row | self.common | self.facts[child.mode]) + "\n")
                middle = statistics.median(values[key])
                spread = (max(values[key]) - min(values[key])) / middle
                ratio = middle / first if key.endswith("_s") else first / middle
                line += f" | {child.mode} {middle:9.3f} (+-{spread:4.0%}) {ratio:5.2f}x"
                if "busy_us" in values:
                    line += f" busy {values['busy_us']:7.0f} us"
        print(line, flush=True)


def measure(options: argparse.Namespace, children: list[Child]) -> None:
    """All cases."""
    report = Report(options, children)
    prompts = [
        (requests, length)
        for length in options.prompts
        for requests in (1, 8)
        if requests * length <= options.most_prompt_tokens
    ]
    if options.together:
        with _failing("first use", children):
            together(children, "first_use", options.decode, prompts)
    for requests, context in options.decode:
        with _failing(f"decode {requests} x {context}", children):
            _decode(options, children, report, requests, context)
    for requests, length in prompts:
        with _failing(f"first token {requests} x {length}", children):
            _first_token(options, children, report, requests, length)
    for length in options.joining:
        with _failing(f"joining {length}", children):
            _joining(options, children, report, length)
    for spec in options.traffic:
        with _failing(f"traffic {spec}", children):
            _traffic(options, children, report, spec)


def together(children: list[Child], name: str, *arguments: Any) -> list[Any]:
    """Ask all modes for the same at once; a failure is raised when all have answered."""
    results, failures = [], []
    for child in children:
        child.send(name, *arguments)
    for child in children:
        try:
            results.append(child.result())
        except RuntimeError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results


@contextlib.contextmanager
def _failing(what: str, children: list[Child]) -> Iterator[None]:
    """A case that fails is printed, and its requests are let go."""
    try:
        yield
    except RuntimeError as error:
        print(f"FAILED {what}: {str(error)[-1500:]}", flush=True)
        for child in children:
            with contextlib.suppress(RuntimeError, EOFError):
                child("end")


def _layers(options: argparse.Namespace) -> str:
    text = f"{options.layers} layers" + (" of V4.1" if options.model == "v4.1" else "")
    text += f", a share of {options.share}" if options.share > 1 else ""
    return text + (f", {options.gpus} GPUs" if options.gpus > 1 else "")


def _decode(
    options: argparse.Namespace, children: list[Child], report: Report, requests: int, context: int
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for child in children:
        child("begin", requests, context)
    for repeat in range(options.repeats):
        for child in children:
            values = found.setdefault(child.mode, {"ms": [], "spin_ms": []})
            values["spin_ms"].append(child("spin"))
            values["ms"].append(child("steps", options.steps))
        if not repeat:
            for child in children:
                profile = child("profile", 8)
                names = Path(options.logs) / f"kernels-{child.mode}-{requests}x{context}.json"
                names.write_text(json.dumps(profile.pop("names_us"), indent=1))
                found[child.mode] |= profile
    for child in children:
        child("end")
    model = f"{_layers(options)}, {options.experts} experts"
    report.row("decode step", f"{requests} x {context:,}, {model}", found, "ms")


def _first_token(
    options: argparse.Namespace, children: list[Child], report: Report, requests: int, length: int
) -> None:
    found: dict[str, dict[str, Any]] = {child.mode: {} for child in children}
    for child in children:  # what is compiled at first use
        child("compiles")
        found[child.mode]["first_ms"] = child("first_token", requests, length, 999)
        found[child.mode] |= {"ms": [], "spin_ms": [], "compiled": child("compiles")}
    seconds = max(values["first_ms"] for values in found.values()) / 1e3
    for repeat in range(options.repeats if seconds < 5 else 2):
        for child in children:
            found[child.mode]["spin_ms"].append(child("spin"))
            took = child("first_token", requests, length, 100 * repeat)
            found[child.mode]["ms"].append(took)
    for child in children:
        profile = child("profile_prompts", requests, length, 997)
        profile.pop("names_us")
        found[child.mode] |= profile
    case = f"{requests} x {length:,}, {_layers(options)}"
    report.row("time to first token", case, found, "ms")
    if requests == 1 and length in options.timeline:
        for child in children:
            traced = [child("timeline", length, 100 * number) for number in range(8)]
            Path(options.logs, f"timeline-{child.mode}-{length}.json").write_text(
                json.dumps(traced)
            )
    firsts = ", ".join(
        f"{mode} {values['first_ms']:.0f} ({', '.join(values['compiled'])})"
        for mode, values in found.items()
    )
    print(f"    the first ever: {firsts} ms", flush=True)


def _joining(
    options: argparse.Namespace, children: list[Child], report: Report, length: int
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for child in children:
        child("begin", 8, _BESIDE)
        child("joining", length, 999)
    for repeat in range(options.repeats):
        for child in children:
            first, step = child("joining", length, 100 * repeat)
            values = found.setdefault(child.mode, {"ms": [], "step_ms": []})
            values["ms"].append(first)
            values["step_ms"].append(step)
    for child in children:
        child("end")
    case = f"{length:,} tokens beside 8 that decode, {_layers(options)}"
    report.row("joining 8", case, found, "ms")


def _traffic(options: argparse.Namespace, children: list[Child], report: Report, spec: str) -> None:
    count, rate, length, new = (float(x) for x in spec.split(":"))
    arguments = int(count), rate, int(length), int(new)
    found: dict[str, dict[str, Any]] = {}
    for repeat in range(3):
        for child in children:
            values = child("traffic", *arguments, repeat) | {"compiled": child("compiles")}
            for key, value in values.items():
                found.setdefault(child.mode, {}).setdefault(key, []).append(value)
    case = f"{count:.0f} requests, {rate:g} a second, {length:,.0f} + {new:.0f}"
    case += f", {_layers(options)}"
    for key in ("ttft_ms", "itl_ms"):
        print("   ", key, {m: round(statistics.median(v[key]), 2) for m, v in found.items()})
    report.row("traffic, tokens/s", case, found, "tokens_s")


def _points(text: str) -> list[tuple[int, int]]:
    return [(int(n), int(length)) for n, length in (point.split("x") for point in text.split(","))]


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main() -> None:
    """Start the modes, measure, append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", help="rows are appended to this file")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="ANYMLA_VLLM of each, by ','; parts of one by '+'"
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel")
    parser.add_argument(
        "--share", type=int, default=1, help="a GPU gets what each of so many would get"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--decode", type=_points, default=_points(_DECODE), help="requests x context, by ','"
    )
    parser.add_argument("--prompts", type=_numbers, default=[1024, 8192, 32768, 131072])
    parser.add_argument("--most-prompt-tokens", type=int, default=8 * 32768)
    parser.add_argument(
        "--timeline", type=_numbers, default=[], help="prompts whose layers are timed, in the logs"
    )
    parser.add_argument("--model", choices=("v4", "v4.1"), default="v4")
    parser.add_argument(
        "--together", action="store_true", help="each case once before, in all modes at once"
    )
    parser.add_argument("--no-rehearsal", action="store_true", help="compile at first use")
    parser.add_argument("--joining", type=_numbers, default=[2048, 16384])
    parser.add_argument("--traffic", nargs="*", default=["64:16:1024:256", "16:2:8192:256"])
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode")
    parser.add_argument("--memory", type=float, help="share of the device that a mode may take")
    parser.add_argument("--cache-gib", type=int, default=30, help="of each mode's pages")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a repeat")
    parser.add_argument("--logs", default=".", help="where each mode's log goes")
    options = parser.parse_args()
    options.modes = [mode.replace("+", ",") for mode in options.modes.split(",")]
    children = [Child(mode, options) for mode in options.modes]
    for child in children:
        child.send("start")
    alive = []
    for child in children:
        try:
            child.result()
            alive.append(child)
        except (RuntimeError, EOFError) as error:
            print(f"FAILED to start {child.mode}: {str(error)[-2500:]}", flush=True)
    try:
        if alive:
            measure(options, alive)
    finally:
        for child in children:
            child.leave()


if __name__ == "__main__":
    main()
