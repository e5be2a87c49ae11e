"""Cost of an audit, and its false alarms: ``ANYMLA_VLLM=off|force audit.py ROWS [STEPS]``."""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from random_model import engine, model_of, prompt

from anymla.audit.settings import Settings
from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts

NEVER = 10**9
# Requests, length of the first prompt, new tokens: decode, mixed with prefill, many, one long.
TRAFFIC = ((8, 1024, 48), (3, 2300, 32), (16, 40, 32), (1, 6000, 24))


class Served:
    """An engine with graphs, and its audit."""

    def __init__(self) -> None:
        """Build the engine; the hooks are in, and look at nothing."""
        from anymla.engines.vllm import audit

        graphs = {"cudagraph_capture_sizes": [1, 8, 16], "cudagraph_mode": "FULL_DECODE_ONLY"}
        self.llm = engine(compilation_config=graphs)
        self.seconds(8, 1024, 400)  # compiles
        self.without = [self.seconds(8, 1024, 400) for _ in range(5)]
        logging.getLogger("vllm.plugins.anymla.audit").setLevel(logging.CRITICAL)
        self.auditor = audit.start(model_of(self.llm)).auditor
        self.every(NEVER)

    def every(self, steps: int) -> None:
        """Audit one step in so many."""
        self.auditor.settings = Settings(every=steps)

    def seconds(self, requests: int, length: int, new: int, seed: int = 0) -> float:
        """Time of a batch of requests whose prompts differ in length."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [prompt(length + 37 * i, 100 * seed + i) for i in range(requests)]
        start = time.perf_counter()
        self.llm.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - start

    def step_ms(self) -> float:
        """Of a decode step of 8 requests."""
        short, long = self.seconds(8, 1024, 2), self.seconds(8, 1024, 42)
        self.auditor.drain()
        return (long - short) / 40 * 1e3


def cost(served: Served) -> list[dict[str, Any]]:
    """Time with an audit beside time without, in turns."""
    rows = []
    for every in (NEVER, 200, 20, NEVER, 200):
        served.every(every)
        before = served.auditor.audited
        times = [served.seconds(8, 1024, 400) for _ in range(5)]
        served.auditor.drain()
        rows.append(
            {
                "part": "cost of an audit",
                "case": f"8 requests x 1,024 + 400 tokens, 1 in {every}",
                "seconds": times,
                "seconds_without": served.without,
                "ratio": statistics.median(times) / statistics.median(served.without),
                "audited_steps": served.auditor.audited - before,
            }
        )
    served.every(1)
    audited = served.step_ms()
    served.every(NEVER)
    step = {"part": "cost of an audit", "case": "one step of 8 requests"}
    return [*rows, {**step, "audited_ms": audited, "other_ms": served.step_ms()}]


def false_alarms(served: Served, steps: int) -> list[dict[str, Any]]:
    """What an audit of every step says of an engine that has no fault."""
    auditor = served.auditor
    auditor.tallies.clear()
    served.every(1)
    before, skipped, turn = auditor.audited, auditor.skipped, 0
    while auditor.audited - before < steps:
        requests, length, new = TRAFFIC[turn % len(TRAFFIC)]
        served.seconds(requests, length + 7 * turn, new, seed=turn)
        auditor.drain()
        turn += 1
    common = {"audited_steps": auditor.audited - before, "skipped": auditor.skipped - skipped}
    return [
        {
            "part": f"false alarms of {method}",
            **common,
            "cases": tally.judged,
            "alarms": tally.alarms,
            "worst_of_bound": tally.worst,
            "rms_of_bound": tally.mean,
        }
        for method, tally in sorted(auditor.tallies.items())
    ]


def main(path: Path, steps: int) -> None:
    """Append the rows."""
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    served = Served()
    rows = cost(served) + false_alarms(served, steps)
    command = f"ANYMLA_VLLM={mode} python benchmarks/vllm/audit.py"
    with path.open("a") as file:
        for row in rows:
            row = row | {"backend": mode} | environment(command) | device_facts()
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
