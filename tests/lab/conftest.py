"""A clock for the benchmark runner that needs no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class FakeClock:
    """Runs the first and the last call of a subject once, and gives scripted times.

    Attributes:
        times: microseconds to give, one after the other; 10.0 when there are no more.
        seen: number of calls and repetitions of every subject; "release" where memory was.
    """

    device = torch.device("cpu")

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.seen: list[object] = []

    def time_us(self, calls, repetitions=20):
        calls[0]()
        calls[-1]()
        self.seen.append((len(calls), repetitions))
        return self.times.pop(0) if self.times else 10.0

    def copy_bandwidth(self):
        return 4e12

    def matmul_rate(self):
        return 8e14

    def copy_us(self, bytes_moved):
        return bytes_moved / 1e6

    def peak_bytes(self, call):
        call()
        return 3_000_000

    def kernel_times(self, call):
        call()
        return [("decode_kernel", 3.0), ("nvjet", 1.0), ("nvjet", 1.5)]

    def release(self):
        self.seen.append("release")


@pytest.fixture
def clock():
    """Ten microseconds for everything."""
    return FakeClock()


@pytest.fixture
def scripted():
    """A clock that gives these times."""
    return FakeClock


@pytest.fixture
def recorded_fields():
    """Fields of the newest recorded row of a part and of a kind of case, without the command's."""

    def fields(file: str, part: str, case: str = "") -> set[str]:
        lines = (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("part") == part]
        row = next(row for row in reversed(rows) if case in row["case"] and "cpu" in row)
        of_command = {
            "part", "case", "target", "met", "date", "command", "commit", "device", "cpu",
            "cpu_capability", "cores", "threads", "load", "python", "torch", "anymla",
            "multiprocessors", "cuda", "triton", "early_launches", "flash_mla", "deep_gemm",
            "side_stream",
        }  # fmt: skip
        return set(row) - of_command | {"seed"}

    return fields


@pytest.fixture
def no_vllm(monkeypatch):
    """Nothing is imported of vLLM at the beginning, nor afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
