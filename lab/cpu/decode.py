"""Decoding of the whole tiny model, next to transformers on the same checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anymla.bench.report import Result
from anymla.model.transformer import Transformer
from anymla.runtime.engine import Engine
from anymla.runtime.request import Request
from lab.cpu.tiny_model import engine_with, load, prompt, tiny
from lab.peers.transformers import Generation, Transformers
from lab.timing import CountedCalls, interleaved, median, milliseconds, ratio_by_round

PART = "whole tiny model, 4 layers, ratios 0,4,128,4, batch 1"
PROMPT_TOKENS = 700
_TARGET = 4.0
_BLOCK = 16
_COUNTED = 4  # steps whose operators are counted; one of them closes windows of four tokens
_PEER = "transformers fp32"
_VARIANTS = {
    "anymla bf16, FP8 cache": (torch.bfloat16, "fp8"),
    "anymla fp32, fp32 cache": (torch.float32, "fp32"),
}


class PeerMissing(RuntimeError):
    """transformers, or the version of it that knows the model, is not installed."""


def decode(directory: Path, rounds: int) -> list[Result]:
    """Measure prefill and decode speed of anymla and of transformers, in turns, in processor time.

    Other processes take no processor time of this one; the times of threads add up. Calls are
    counts of the operators that torch dispatches in a step, without numba's kernels.

    Args:
        directory: empty directory for a bfloat16 checkpoint, which both load.
        rounds: number of turns, of 16 tokens each.

    Raises:
        PeerMissing: there is nothing to compare with.
        AssertionError: both in float32 choose different tokens.
    """
    transformers = Transformers()
    support = transformers.available()
    if not support:
        raise PeerMissing(support.reason)
    checkpoint = tiny(directory)
    runs: dict[str, Callable[[], int]] = {}
    prefill: dict[str, float] = {}
    chosen: dict[str, list[int]] = {}
    limit = _BLOCK * (rounds + 2) + _COUNTED
    for name, (dtype, kv_cache) in _VARIANTS.items():
        model = load(checkpoint, dtype)
        _Ours(model, kv_cache, limit)  # warms up
        ours = _Ours(model, kv_cache, limit)
        prefill[name], chosen[name], runs[name] = ours.prefill_s, ours.tokens, ours.next_token
    ids = prompt(model, PROMPT_TOKENS)
    network = transformers.load(checkpoint)
    Generation(network, ids)  # warms up
    peer = Generation(network, ids)
    prefill[_PEER], chosen[_PEER], runs[_PEER] = peer.prefill_s, peer.tokens, peer.next_token
    times = interleaved(runs, rounds=rounds, block=_BLOCK, warm_up=_BLOCK, clock=time.process_time)
    same = chosen["anymla fp32, fp32 cache"][: 2 * _BLOCK] == chosen[_PEER][: 2 * _BLOCK]
    assert same, "anymla and transformers choose different tokens in float32"
    calls = {}
    for name, run in runs.items():
        with CountedCalls() as counted:
            for _ in range(_COUNTED):
                run()
        calls[name] = counted.count / _COUNTED
    results = []
    for name in runs:
        values: dict[str, Any] = {
            "prefill_ms": prefill[name] * 1e3,
            **milliseconds(times[name], "decode_ms"),
            "tokens_per_s": 1 / median(times[name]),
            "torch_calls": calls[name],
            "clock": "process_time",
        }
        if name == _PEER:
            results.append(Result(PART, name, values | {"version": transformers.version()}))
            continue
        speedup = ratio_by_round(times[_PEER], times[name], rounds)
        values["times_transformers"] = speedup
        values["prefill_times_transformers"] = prefill[_PEER] / prefill[name]
        judged = name == next(iter(_VARIANTS))
        results.append(
            Result(
                PART,
                name,
                values,
                target=f"decode >= {_TARGET:g} x transformers" if judged else None,
                met=speedup >= _TARGET if judged else None,
            )
        )
    return results


class _Ours:
    """A request that has read the prompt and generates one token per call."""

    def __init__(self, model: Transformer, kv_cache: str, limit: int) -> None:
        request = Request("bench", prompt(model, PROMPT_TOKENS), max_new_tokens=limit)
        self.engine: Engine = engine_with(model, request, kv_cache)
        self.tokens: list[int] = []
        start = time.process_time()
        while not self.tokens:
            self.next_token()
        self.prefill_s = time.process_time() - start

    def next_token(self) -> int:
        """Run one step and return its token."""
        self.tokens += self.engine.step().new_tokens.get("bench", [])
        return len(self.tokens)
