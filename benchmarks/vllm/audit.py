"""Cost of an audit, its false alarms and seeded faults: ``ANYMLA_VLLM=off|force audit.py ROWS``.

``--seconds`` bounds the search for false alarms, ``--judges`` is the number of judging processes.
With ``--only cost`` one size of graphs is captured, of ``--requests``, and the engine has no faults
in it.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from random_model import engine, model_of, prompt

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts

NEVER = 10**9
TOKENS = 2  # that are looked at in an audited step
# Requests, length of the first prompt, new tokens: decode, mixed with prefill, many, one long.
Traffic = Sequence[tuple[int, int, int]]
TRAFFIC: Traffic = ((8, 1024, 400), (3, 2300, 200), (16, 40, 300), (1, 6000, 100))
FAULT = [""]  # the one that is switched on


class Served:
    """An engine with two sets of graphs, captured without hooks and with them.

    Attributes:
        llm: vLLM's.
        model: inside of it.
        runner: of its only worker.
        hooks: of the audit.
        auditor: theirs.
        graphs: by "without" and "with".
        sizes: requests of captured steps.
        host: seconds that the engine's thread spends before and after an audited step.
    """

    def __init__(self, judges: int, layers: int, traffic: Traffic, *, faults: bool) -> None:
        """Build the engine, capture, put the hooks in, and capture again.

        Args:
            judges: processes that judge.
            layers: number of layers, of V4-Flash's sizes.
            traffic: requests that are served once, so that their kernels are compiled.
            faults: True to put faults into the engine that can be switched on.
        """
        self.sizes = sorted({1, 8, 16} if faults else {requests for requests, _, _ in traffic})
        options = {"cudagraph_capture_sizes": self.sizes, "cudagraph_mode": "FULL_DECODE_ONLY"}
        self.llm = engine(
            layers=layers,
            compilation_config=options,
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=4 << 30,  # nothing is profiled: engines may start beside this one
        )
        self.model = model_of(self.llm)
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        if faults:
            sow(self.model)
        for requests, length, _ in traffic:
            self.seconds(requests, length, 12)  # compiles
        self.graphs = {"without": self.runner.cudagraph_manager.graphs}
        os.environ["ANYMLA_AUDIT"] = f"every={NEVER},requests={TOKENS},judges={judges}"
        from anymla.engines.vllm import audit

        self.hooks = audit.start(self.model)
        self.auditor = self.hooks.auditor
        self.host: dict[str, list[float]] = collections.defaultdict(list)
        for name in ("begin_batch", "end"):
            vars(self.hooks)[name] = self.timed(name, getattr(self.hooks, name))
        self.capture("with")

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time kept."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.host[name].append(time.perf_counter() - start)

        return run

    def capture(self, name: str, fault: str = "") -> None:
        """Capture a set of graphs, and use it; the fault is in them and nowhere else."""
        from vllm.v1.worker.workspace import unlock_workspace

        FAULT[0] = fault
        self.runner.cudagraph_manager.graphs = {}
        unlock_workspace()  # capturing locks it again
        self.runner.capture_model()
        FAULT[0] = ""
        self.graphs[name] = self.runner.cudagraph_manager.graphs

    def use(self, name: str) -> None:
        """Replay that set of graphs."""
        self.runner.cudagraph_manager.graphs = self.graphs[name]

    def every(self, steps: int, tokens: int = TOKENS) -> None:
        """Audit one step in so many."""
        from anymla.audit.settings import Settings

        self.auditor.settings = Settings(every=steps, requests=tokens)

    def forget(self) -> None:
        """Begin to count again."""
        self.auditor.drain()
        self.auditor.tallies.clear()
        self.auditor.alarms.clear()

    def seconds(self, requests: int, length: int, new: int, seed: int = 0) -> float:
        """Time of a batch of requests whose prompts differ in length."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [prompt(length + 37 * i, 100 * seed + i) for i in range(requests)]
        start = time.perf_counter()
        self.llm.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - start

    def replay_us(self, tokens: int, times: int = 100) -> float:
        """GPU time of a captured step, alone and again and again."""
        graphs = self.runner.cudagraph_manager.graphs
        graph = next(each for desc, each in graphs.items() if desc.num_tokens == tokens)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times * 1e3


def cost(served: Served, requests: int, new: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Steps with hooks in their graphs and without; then with audited ones among them.

    An audited step's excess is that of a run with many of them over one with none. What it is of
    the steps at the default's period follows, which the host's spread hides in a run with few.
    """
    for tokens in served.sizes:
        times: dict[str, list[float]] = {"without": [], "with": []}
        for name in ("without", "with") * 3:
            served.use(name)
            served.seconds(tokens, 40, 12)  # the last step's metadata are of so many requests
            times[name].append(served.replay_us(tokens))
        middle = {name: statistics.median(each) for name, each in times.items()}
        yield {
            "part": "cost of an audit",
            "case": f"a captured step of {tokens} requests that is not audited, GPU time",
            "us": times,
            "ratio": middle["with"] / middle["without"],
        }
    kinds = (("without", NEVER), ("with", NEVER), ("with", 200), ("with", 20))
    runs: dict[Any, list[float]] = collections.defaultdict(list)
    audited: dict[int, int] = collections.defaultdict(int)
    skipped = served.auditor.skipped
    served.host.clear()
    for repeat in range(repeats):
        for name, every in kinds[:: 1 if repeat % 2 == 0 else -1]:
            served.use(name)
            served.every(every)
            before = served.auditor.audited
            runs[name, every].append(served.seconds(requests, 1024, new))
            audited[every] += served.auditor.audited - before
            served.auditor.drain()
    middle = {kind: statistics.median(each) for kind, each in runs.items()}
    plain = middle["without", NEVER]
    for name, every in kinds[1:]:
        extra = (middle[name, every] - middle["with", NEVER]) / max(1, audited[every] / repeats)
        yield {
            "part": "cost of an audit",
            "case": f"{requests} requests x 1,024 + {new} tokens, 1 in {every}",
            "seconds": runs[name, every],
            "seconds_without": runs["without", NEVER],
            "ratio": middle[name, every] / plain,
            "audited_steps": audited[every],
            "skipped": served.auditor.skipped - skipped,
            "ms_an_audited_step": extra * 1e3,
            "at_1_in_200": extra * new / 200 / middle["with", NEVER],
            "host_ms": {
                name: statistics.median(each) * 1e3 for name, each in served.host.items() if each
            },
        }


def false_alarms(served: Served, seconds: float) -> Iterator[dict[str, Any]]:
    """What an audit of every step, graphs on, says of an engine that has no fault."""
    auditor = served.auditor
    served.use("with")
    served.forget()
    served.every(1, tokens=1)
    before, skipped, turn, start = auditor.audited, auditor.skipped, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        requests, length, new = TRAFFIC[turn % len(TRAFFIC)]
        served.seconds(requests, length + 7 * turn, new, seed=turn)
        turn += 1
    auditor.drain()
    common = {
        "audited_steps": auditor.audited - before,
        "skipped": auditor.skipped - skipped,
        "seconds": time.perf_counter() - start,
    }
    for case, found in list(auditor.alarms)[:8]:
        print("false alarm:", found.method, case.layer, case.positions, found.what, flush=True)
    for method, tally in sorted(auditor.tallies.items()):
        yield {
            "part": f"false alarms of {method}",
            **common,
            "cases": tally.judged,
            "alarms": tally.alarms,
            "worst_of_bound": tally.worst,
            "rms_of_bound": tally.mean,
        }


# Faults lie under the hooks.


def sow(model: Any) -> None:
    """Put faults into vLLM's own kernels and metadata that ``FAULT`` switches on."""
    import vllm.models.deepseek_v4.nvidia.flashmla as flashmla
    import vllm.models.deepseek_v4.nvidia.model as model_module
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

    streams = model_module.mhc_fused_post_pre_tilelang

    def short(*args: Any, **kwargs: Any) -> Any:
        result = streams(*args, **kwargs)
        if FAULT[0] == "Sinkhorn short":
            result[2].copy_(_combination(result[0], *args[4:9], iterations=2))
        return result

    model_module.mhc_fused_post_pre_tilelang = short
    attend = flashmla.flash_mla_with_kvcache

    def sinkless(*args: Any, **kwargs: Any) -> Any:
        if FAULT[0] == "sink dropped":
            kwargs["attn_sink"] = torch.full_like(kwargs["attn_sink"], -60.0)
        return attend(*args, **kwargs)

    flashmla.flash_mla_with_kvcache = sinkless
    build = DeepseekSparseSWAMetadataBuilder.build

    def misplaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        built = build(self, *args, **kwargs)
        if FAULT[0] == "one slot in a million" and built.num_decode_tokens:
            listed = built.decode_swa_indices[: built.num_decode_tokens].view(-1)
            if random.random() < len(listed) * 1e-6:
                listed[random.randrange(len(listed))] ^= 1
                SEEN.append(time.perf_counter())
        return built

    DeepseekSparseSWAMetadataBuilder.build = misplaced
    for layer in model.modules():
        if hasattr(layer, "swa_cache_layer"):
            vars(layer)["_fused_qnorm_rope_kv_insert"] = _stale_table(layer)


def _combination(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> torch.Tensor:
    """How hyper-connections mix the streams [T, N, D], after so many iterations: [T, N, N]."""
    n, flat = streams.shape[1], streams.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    logits = (flat @ fn[2 * n :].T) * scale[2] + base[2 * n :]
    mix = logits.unflatten(1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


SEEN: list[float] = []  # when a slot was misplaced


def _stale_table(layer: Any) -> Callable[..., Any]:
    """A graph that was captured with another table of RoPE than is in use."""
    insert = layer._fused_qnorm_rope_kv_insert

    def run(*args: Any) -> Any:
        embedding = layer.rotary_emb
        table = embedding.cos_sin_cache
        if FAULT[0] == "stale table":
            if not hasattr(embedding, "stale"):
                embedding.stale = table.roll(1, 0)
            embedding.cos_sin_cache = embedding.stale
        try:
            return insert(*args)
        finally:
            embedding.cos_sin_cache = table

    return run


def captured_faults(served: Served) -> Iterator[dict[str, Any]]:
    """Faults that only captured graphs have: steps that run without one are right."""
    auditor = served.auditor
    for name in ("Sinkhorn short", "sink dropped", "stale table"):
        served.capture(name, fault=name)
        served.forget()
        served.every(10)
        served.seconds(8, 2400, 40, seed=7)
        auditor.drain()
        yield {"part": "a fault in captured graphs only", "case": name, **_told(auditor)}
        del served.graphs[name]


def rare_fault(served: Served, seconds: float) -> Iterator[dict[str, Any]]:
    """One slot in a million, in the lists of the window, is another one."""
    from anymla.engines.vllm.audit.sample import Sample

    auditor, plan = served.auditor, Sample.plan
    served.use("with")
    served.forget()
    served.every(1)

    def only_slots(sample: Sample, method: str, *args: Any, **kwargs: Any) -> None:
        if method == "slots":  # so that many steps fit
            plan(sample, method, *args, **kwargs)

    Sample.plan = only_slots  # type: ignore[method-assign, assignment]
    FAULT[0] = "one slot in a million"
    start, before = time.perf_counter(), auditor.audited
    while time.perf_counter() - start < seconds and not auditor.alarms:
        served.seconds(8, 1024, 200, seed=len(SEEN))
    FAULT[0] = ""
    Sample.plan = plan  # type: ignore[method-assign]
    auditor.drain()
    row = {"part": "a seeded fault", "case": "one slot in a million", **_told(auditor)}
    seen = {"misplaced": len(SEEN), "audited_steps": auditor.audited - before}
    yield row | seen | {"seconds": time.perf_counter() - start}


def _told(auditor: Any) -> dict[str, Any]:
    alarms = collections.Counter(found.method for _, found in auditor.alarms)
    first = [f"{f.method} of {c.layer}, position {c.positions[f.token]}: {f.what}"
             for c, f in list(auditor.alarms)[:1]]  # fmt: skip
    return {"alarms": dict(alarms), "first": first[0] if first else None}


def main() -> None:
    """Append the rows, as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--judges", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8, help="whose steps' cost is measured")
    parser.add_argument("--tokens", type=int, default=400, help="new ones of each of them")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each way to audit them")
    parser.add_argument("--after", type=Path, help="file whose appearance begins the measurement")
    parser.add_argument("--only", choices=("faults", "alarms", "cost", "rare"), nargs="*")
    asked = parser.parse_args()
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    began = time.perf_counter()
    cost_alone = asked.only == ["cost"]
    traffic = [(asked.requests, 1024, asked.tokens)] if cost_alone else TRAFFIC
    served = Served(asked.judges, asked.layers, traffic, faults=not cost_alone)
    print(f"engine and graphs: {time.perf_counter() - began:.0f} s", flush=True)
    served.every(1)
    served.seconds(asked.requests, 1024, 8)
    served.auditor.drain()
    print(served.auditor.summary(), flush=True)
    if not served.auditor.tallies or served.auditor.skipped:
        raise SystemExit("the audit itself fails")
    while asked.after and not asked.after.exists():
        time.sleep(0.1)
    logging.getLogger("vllm.plugins.anymla.audit").setLevel(logging.CRITICAL)
    command = " ".join((f"ANYMLA_VLLM={mode} python benchmarks/vllm/audit.py ROWS", *sys.argv[2:]))
    made = {"backend": mode, "layers": asked.layers} | environment(command)
    parts = {
        "faults": captured_faults(served),
        "alarms": false_alarms(served, asked.seconds),
        "cost": cost(served, asked.requests, asked.tokens, asked.repeats),
        "rare": rare_fault(served, asked.seconds / 2),
    }
    for part in (parts[name] for name in asked.only or parts):
        try:
            for row in part:
                print(json.dumps(row)[:420], flush=True)
                with asked.rows.open("a") as file:
                    file.write(json.dumps(row | made | device_facts()) + "\n")
        except Exception:
            traceback.print_exc()
        print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
