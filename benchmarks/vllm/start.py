"""How long does vLLM take to start, and what does it compile afterwards? ``start.py ROWS``.

``ANYMLA_VLLM=off|force|auto`` decides who serves; whose compiled kernels are found is decided by
the folders of caches (``TRITON_CACHE_DIR`` and others), so that a first run with empty ones is a
cold start and a second one a warm start. ``--cores`` bounds the cores, as ``taskset`` does.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()  # before torch and vLLM are imported

import argparse  # noqa: E402
import collections  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

LONGEST = 6000  # tokens of a prompt of random traffic


def main() -> None:
    """Start, serve a little, and append rows as they come."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel")
    parser.add_argument("--cores", help="such as 0-15")
    parser.add_argument("--label", default="", help="such as cold")
    parser.add_argument("--seconds", type=float, default=0, help="of random traffic")
    parser.add_argument("--repeats", type=int, default=0, help="of traffic as vllm bench serve's")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 32], help="of graphs")
    asked = parser.parse_args()
    if asked.cores:
        first, _, last = asked.cores.partition("-")
        os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
    mode = os.environ.get("ANYMLA_VLLM", "auto")
    rehearsed = mode != "off"  # vLLM's own takes ten minutes

    import random_model
    import speed

    from anymla.bench.environment import environment
    from anymla.engines.vllm.pinned import installed_version

    class Started(speed.Server):
        """An engine whose start is measured; requests and traffic are as in ``speed.py``."""

        def __init__(self) -> None:
            """Start it."""
            self.prompt = random_model.prompt
            self.llm = random_model.engine(
                experts=asked.experts,
                layers=asked.layers,
                tensor_parallel_size=asked.gpus,
                max_num_seqs=max(asked.sizes),
                max_num_batched_tokens=8192,
                gpu_memory_utilization=0.3,
                kv_cache_memory_bytes=4 << 30,
                compilation_config={
                    "cudagraph_capture_sizes": asked.sizes,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                },
                kernel_config={"enable_jit_warmup": rehearsed},
                disable_log_stats=True,
            )
            self.engine, self.number, self.running = self.llm.llm_engine, 0, []
            self.started = time.perf_counter() - BEGAN

        def any_traffic(self, seconds: float, seed: int = 0) -> dict[str, Any]:
            """Requests of any length that arrive at random."""
            numbers, came = random.Random(seed), 0
            end = time.perf_counter() + seconds
            slowest, after = 0.0, 0.0
            while time.perf_counter() < end or self.engine.has_unfinished_requests():
                if time.perf_counter() < end and time.perf_counter() >= after:
                    length = round(LONGEST ** numbers.random())
                    self._add(max(2, length), numbers.randrange(1, 64), seed=came)
                    came += 1
                    after = time.perf_counter() + numbers.expovariate(8)
                if self.engine.has_unfinished_requests():
                    start = time.perf_counter()
                    self._step()
                    slowest = max(slowest, time.perf_counter() - start)
            return {"requests": came, "slowest_step_s": slowest}

        def compiled(self) -> dict[str, Any]:
            """Kernels that Triton compiled since the last call, on each rank."""
            ranks = self.llm.collective_rpc("bench_compiled")
            names: collections.Counter[str] = collections.Counter()
            for rank in ranks:
                names.update(rank)
            return {"compiled": [len(each) for each in ranks], "names": dict(names)}

    served = Started()
    command = "python benchmarks/vllm/start.py ROWS " + " ".join(sys.argv[2:])
    common = {"backend": mode, "vllm": installed_version(), **environment(command.strip())}
    common |= {k: v for k, v in vars(asked).items() if k not in ("rows", "sizes")}
    from anymla.bench.gpu import device_facts

    common |= device_facts()

    def row(case: str, found: dict[str, Any]) -> None:
        print(mode, asked.label, case, json.dumps(found)[:600], flush=True)
        with asked.rows.open("a") as file:
            file.write(json.dumps({"part": "start", "case": case} | found | common) + "\n")

    at_start = served.compiled()
    row("start", {"started_s": round(served.started, 1), "compiled": at_start["compiled"]})
    first = [served.first_token(1, 1024, seed) for seed in range(3)]
    row("first tokens, 1 x 1,024", {"ms": first} | served.compiled())
    if asked.seconds:
        found = served.any_traffic(asked.seconds)
        row("random traffic", found | served.compiled())
    for repeat in range(asked.repeats):
        found = served.traffic(48, 24.0, 1024, 256, seed=1000 * repeat)
        row("48 requests, 24 a second, 1,024 + 256", found | served.compiled())


if __name__ == "__main__":
    main()
