"""Random traffic with every step audited: ``traffic.py CHECKPOINT ANSWER STEPS SEED [SECONDS]``.

Requests join and leave, some are cancelled; prompts come in chunks, share beginnings that the
prefix cache holds, and there are too few pages for all, so that requests are preempted.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import chunked
from inputs import prompt_of

LONGEST = 2900  # tokens of a request; beyond 2,048 the indexer has to choose
SHARED = (60, 300, 511, 700, 2100)  # lengths of the beginnings that prompts share
REQUESTS = 6  # at once
CHUNK = 320  # tokens of a step
PAGES = 600  # of all caches together: a few long requests fill them


class Probe:
    """What is asked of a worker."""

    def _audit(self) -> Any:
        return self.model_runner.get_model().anymla_audit

    def anymla_audit_all(self) -> None:
        """Wait for the judges where a step would be passed over."""

        def full(auditor: Any) -> bool:
            if auditor._steps.full():
                auditor.drain()
            return False

        auditor = self._audit().auditor
        type(auditor).full = property(full)
        auditor.step = auditor.audited = auditor.skipped = 0
        auditor.tallies.clear()

    def anymla_steps(self) -> int:
        """Steps so far."""
        return self._audit().auditor.step

    def anymla_found(self) -> dict[str, Any]:
        """What the audit has found."""
        auditor = self._audit().auditor
        auditor.drain()
        return {
            "steps": auditor.step,
            "audited": auditor.audited,
            "skipped": auditor.skipped,
            "tallies": {n: dataclasses.asdict(t) for n, t in sorted(auditor.tallies.items())},
            "alarms": [
                {"method": f.method, "layer": c.layer, "step": c.step, "what": f.what}
                for c, f in auditor.alarms
            ],
        }


class Traffic:
    """Requests drawn at random; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        """Nothing is drawn yet."""
        self._random = random.Random(seed)
        self._number = 0
        # Positions count in a prompt's tokens, so different offsets share nothing.
        self._tokens = prompt_of(400_000)
        self.cancelled = 0

    def request(self) -> tuple[str, list[int], int]:
        """A name, a prompt, and how many tokens are wanted."""
        numbers = self._random
        self._number += 1
        length = numbers.choice((1, 3, 20, 40, 130, 130, 300, 700, 2200))
        length += numbers.randrange(1 + length // 4)
        own = numbers.randrange(1000, len(self._tokens) - LONGEST)
        prompt = self._tokens[own : own + length]
        if numbers.random() < 0.7:
            shared = numbers.choice([each for each in SHARED if each <= length] or [0])
            prompt = self._tokens[:shared] + prompt[shared:]
        wanted = min(numbers.choice((1, 2, 8, 30, 90, 300, 600)), LONGEST - length)
        return str(self._number), prompt, wanted

    def step(self, engine: Any, running: set[str]) -> None:
        """Perhaps a request joins, perhaps one leaves before its end; a step runs."""
        from vllm import SamplingParams

        numbers = self._random
        while not running or (len(running) < 2 * REQUESTS and numbers.random() < 0.3):
            name, prompt, wanted = self.request()
            asked = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompt}, asked)
            running.add(name)
        if running and numbers.random() < 0.01:
            name = numbers.choice(sorted(running, key=int))
            engine.abort_request([name])
            running.remove(name)
            self.cancelled += 1
        if numbers.random() < 0.005:
            engine.reset_prefix_cache(reset_running_requests=True)  # preempts all
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)


def run(checkpoint: str, steps: int, seed: int, seconds: float) -> dict[str, Any]:
    """What the audit says of so many steps, or of so many seconds, and what happened in them."""
    from vllm import LLM

    chunked.allow()
    llm = LLM(
        checkpoint,
        max_model_len=LONGEST + 100,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=CHUNK,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=PAGES,
        disable_log_stats=False,
        worker_extension_cls="traffic.Probe",
        seed=0,
    )
    llm.collective_rpc("anymla_audit_all")
    traffic, running, begun = Traffic(seed), set[str](), time.perf_counter()
    end = begun + seconds
    while llm.collective_rpc("anymla_steps")[0] < steps and time.perf_counter() < end:
        for _ in range(50):
            traffic.step(llm.llm_engine, running)
    answer = llm.collective_rpc("anymla_found")[0]
    counted = {"preempted": "vllm:num_preemptions", "cached": "vllm:prefix_cache_hits"}
    metrics = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
    return answer | {
        "seconds": time.perf_counter() - begun,
        "requests": traffic._number,
        "cancelled": traffic.cancelled,
        **{name: metrics[theirs] for name, theirs in counted.items()},
    }


if __name__ == "__main__":
    steps, seed = map(int, sys.argv[3:5])
    answered = run(sys.argv[1], steps, seed, float((sys.argv[5:] or ["inf"])[0]))
    Path(sys.argv[2]).write_text(json.dumps(answered))
