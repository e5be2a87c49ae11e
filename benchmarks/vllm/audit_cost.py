"""What an audit costs one request that decodes: ``ANYMLA_VLLM=force audit_cost.py ROWS``.

Graphs are captured without hooks and with them, as in ``audit.py``, and replayed in turns.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from random_model import engine, model_of, prompt

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from audit import NEVER, Served

KINDS = (("without", NEVER), ("with", NEVER), ("with", 200), ("with", 20))
CONTEXT = 1024


class One(Served):
    """An engine that decodes one request, with two sets of graphs."""

    def __init__(self, layers: int, judges: int) -> None:
        """Build the engine, capture, put the hooks in, and capture again."""
        self.llm = engine(
            layers=layers,
            compilation_config={
                "cudagraph_capture_sizes": [1],
                "cudagraph_mode": "FULL_DECODE_ONLY",
            },
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=4 << 30,
        )
        self.model, self.host = model_of(self.llm), collections.defaultdict(list)
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self.seconds(1, CONTEXT, 12)  # compiles
        self.graphs = {"without": self.runner.cudagraph_manager.graphs}
        os.environ["ANYMLA_AUDIT"] = f"every={NEVER},requests=2,judges={judges}"
        from anymla.engines.vllm import audit

        self.hooks = audit.start(self.model)
        self.auditor = self.hooks.auditor
        self.capture("with")

    def decode(self, steps: int, seed: int) -> list[float]:
        """Milliseconds of each of so many decode steps."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            temperature=0, max_tokens=steps + 20, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        inner, times = self.llm.llm_engine, []
        inner.add_request(f"cost {seed}", prompt(CONTEXT, seed % 7), asked)
        while inner.has_unfinished_requests():
            start = time.perf_counter()
            inner.step()
            times.append(1e3 * (time.perf_counter() - start))
        return times[10 : 10 + steps]


def main() -> None:
    """Append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--judges", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.24, help="of 43 layers, as measured")
    asked = parser.parse_args()
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    served = One(asked.layers, asked.judges)
    for number, (name, every) in enumerate(KINDS):  # what the audit itself compiles
        served.use(name)
        served.every(every)
        served.decode(60, number)
    served.auditor.drain()
    before, skipped = served.auditor.audited, served.auditor.skipped
    runs: dict[Any, list[float]] = collections.defaultdict(list)
    middles: dict[Any, list[float]] = collections.defaultdict(list)
    audited: dict[Any, int] = collections.Counter()
    number = 1000
    for _ in range(asked.repeats):
        for kind in KINDS:
            served.use(kind[0])
            served.every(kind[1])
            number += 1
            counted = served.auditor.audited
            times = served.decode(asked.steps, number)
            audited[kind] += served.auditor.audited - counted
            served.auditor.drain()
            runs[kind].append(statistics.fmean(times))
            middles[kind].append(statistics.median(times))
    plain = statistics.median(runs[KINDS[0]])
    hooked = statistics.median(runs[KINDS[1]])
    often = statistics.median(runs[KINDS[3]])
    share = audited[KINDS[3]] / (asked.repeats * asked.steps)
    ms = (often - hooked) / share if share else None
    common = {
        "backend": mode,
        **environment(f"ANYMLA_VLLM={mode} python benchmarks/vllm/audit_cost.py"),
    }
    common |= device_facts()
    for kind in KINDS:
        name = "no hooks" if kind[0] == "without" else "hooks, none audited"
        case = name if kind[1] == NEVER else f"1 in {kind[1]}"
        row = {
            "part": "cost of an audit, one request",
            "case": f"{case}, {asked.layers} layers",
            "mean_step_ms": runs[kind],
            "median_step_ms": middles[kind],
            "ratio_to_no_hooks": statistics.median(runs[kind]) / plain,
            "audited_steps": audited[kind],
        }
        if kind is KINDS[3] and ms is not None:
            row["ms_an_audited_step"] = ms
            row["share_of_43_layers_at_1_in_200"] = ms / 200 / asked.step_ms
            row["share_of_these_layers_at_1_in_200"] = ms / 200 / hooked
        print(json.dumps(row)[:700], flush=True)
        with asked.rows.open("a") as file:
            file.write(json.dumps(row | common) + "\n")
    print(
        f"audited {served.auditor.audited - before}, skipped {served.auditor.skipped - skipped}, "
        f"alarms {len(served.auditor.alarms)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
