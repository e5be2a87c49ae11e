"""What ``auto`` takes for speed is slower in no recorded kind of step."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from anymla.engines.vllm import report

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
KINDS = ("decode step", "time to first token", "joining 8")
AT_FIRST_USE = ", without rehearsal"  # a second run of a case, whose kernels were compiled in it


def times(
    case: str, version: str, *, rehearsed: bool = True, rows: str = "vllm_h200.jsonl"
) -> dict[tuple[str, str], dict[str, float]]:
    """By kind of step and case: the time of each backend, the newest of each."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in map(json.loads, (RESULTS / rows).read_text().splitlines()):
        if row["part"] not in KINDS or row["vllm"] != version:
            continue
        if case in row["case"] and row["case"].endswith(AT_FIRST_USE) != rehearsed:
            found.setdefault((row["part"], row["case"]), {})[row["backend"]] = _time(row)
    return found


def _time(row: dict[str, Any]) -> float:
    """Of a decode step what the device takes: a graph's host does not matter in a large model."""
    return row["busy_us"] if "busy_us" in row else statistics.median(row["ms"])


@pytest.mark.parametrize(("part", "machine", "version"), report.FASTER)
def test_a_part_by_itself(part: str, machine: str, version: str) -> None:
    assert machine == "sm_90"  # what these rows are of
    cases = times("five engines", version)
    assert {kind for kind, _ in cases} == set(KINDS)
    for case, backends in cases.items():
        (ours,) = (us for name, us in backends.items() if part in name.split(","))
        assert ours <= backends["off"], (part, case)


@pytest.mark.parametrize("version", ["0.32.0", *(v for _, v in report.FASTER_TOGETHER)])
def test_all_parts_together(version: str) -> None:
    cases = times("43 layers", version)
    assert {kind for kind, _ in cases} == set(KINDS)
    for case, backends in cases.items():
        assert backends["force"] < backends["off"], case


@pytest.mark.parametrize(("machine", "version"), report.FASTER_TOGETHER)
def test_all_parts_together_without_rehearsal(machine: str, version: str) -> None:
    """First tokens of one prompt alone were the host's; joins as fast as vLLM's, or faster."""
    assert machine == "sm_90"
    cases = times("43 layers", version, rehearsed=False)
    assert {kind for kind, _ in cases} == set(KINDS)
    slower = {key for key, backends in cases.items() if backends["force"] >= backends["off"]}
    assert slower == {("time to first token", "1 x 1,024, 43 layers" + AT_FIRST_USE)}


@pytest.mark.parametrize(
    ("version", "gpus"), [(v, gpus) for v, every in report.FASTER_ON.items() for gpus in every]
)
def test_all_parts_together_on_several_gpus(version: str, gpus: int) -> None:
    cases = times(f"43 layers, {gpus} GPUs", version, rows="vllm_h100.jsonl")
    assert {kind for kind, _ in cases} == set(KINDS)
    for case, backends in cases.items():
        assert backends["force"] < backends["off"], case
