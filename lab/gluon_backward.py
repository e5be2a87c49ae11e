"""Judge and time every configuration of the Hopper gradients of prefill attention, on an H200.

``python -m lab.gluon_backward ROWS.jsonl`` takes nine minutes at most. A configuration runs in
processes of its own, each with a time limit, so that one that hangs or faults costs no other its
rows. First all of them compile at once, and are compared with torch on small ragged calls; then
those that are right are timed, one after the other, beside Triton and cuDNN frontend, on the shapes
of ``lab.backward_tiles``. Their gradients there are compared with Triton's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

from anymla.child_process import python_command, same_modules
from anymla.ops.attention.composed import named_rows
from anymla.ops.attention.prefill_backward_config import GluonBackwardConfig
from anymla.testing.tolerance import relative_l2
from lab.backward_tiles import SHAPES, Call, Shape

PART = "gradients of prefill attention, configurations"
# Relative L2 from torch, which rounds neither p nor ds.
LARGEST_ERROR = 1e-2
SMALL = (
    Shape(64, 200, tokens=40), Shape(128, 100, tokens=24), Shape(64, 0, 100, tokens=40),
    Shape(64, 0, tokens=40),
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "queries alone": {"gradients": "queries"},
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A backend in one configuration.

    Attributes:
        backend: "gluon_sm90", "triton", or "cudnn_frontend" for the peer.
        config: configuration of "gluon_sm90".
        ways: keys of ``WAYS`` that are timed.
    """

    backend: str
    config: GluonBackwardConfig | None = None
    ways: tuple[str, ...] = ("default",)


def variants() -> dict[str, Variant]:
    """Return all variants by name, the most valuable first."""
    found = {
        "triton": Variant("triton", ways=tuple(WAYS)),
        "cudnn_frontend": Variant("cudnn_frontend"),
    }
    for config in (GluonBackwardConfig(segment=64), GluonBackwardConfig(segment=128)):
        name = f"gluon, {config.segment} bytes"
        found[name] = Variant("gluon_sm90", config, tuple(WAYS))
    return found


def ragged(call: Call) -> None:
    """Shorten windows and lists, and leave holes and repetitions in lists."""
    tokens = len(call.q)
    draw = torch.Generator(device="cpu").manual_seed(tokens)
    length = torch.rand((2, tokens), generator=draw).to(call.ranges.device)
    for place, column in enumerate((1, 3)):
        call.ranges[:, column] = (call.ranges[:, column] * length[place]).int()
    call.ranges[0], call.ranges[1, 3] = 0, 0
    if call.lists is not None:
        call.lists[:, 3] = call.lists[:, 4]
        call.lists[:, 6::9] = -1
        call.lists[2] = -1
    call.attend()


def runs(variant: Variant, call: Call, way: str) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of a variant's gradients."""
    if variant.backend != "cudnn_frontend":
        return functools.partial(call.run, variant.backend, **WAYS[way])
    from lab.peers import cudnn_frontend

    index, used = named_rows(
        call.ranges, call.lists, call.options["window"], call.options["entries"]
    )
    column = torch.arange(index.shape[1], device=index.device)
    listed = index.where(column < used.unsqueeze(1), -1).int().contiguous()
    return cudnn_frontend.gradients(
        call.dout, call.q, call.rows, listed, call.out, call.lse, call.options["sink"]
    )


def configured(variant: Variant) -> Any:
    """Return a context in which Hopper's launcher takes the variant's configuration."""
    if variant.config is None:
        return mock.patch.dict({})
    from anymla.ops.attention import gluon_sm90_prefill_backward_launch as launch

    return mock.patch.object(launch, "choose_gluon_config", return_value=variant.config)


def checked(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the distance of small ragged gradients from torch's, and whether it may be timed."""
    variant = variants()[name]
    for shape in SMALL if variant.backend != "cudnn_frontend" else SMALL[:2]:
        call = Call(shape, device)
        if variant.backend != "cudnn_frontend":
            ragged(call)
        want = call.run("torch")
        for way in variant.ways if "queries alone" not in variant.ways else variant.ways[:2]:
            run = runs(variant, call, way)
            got, again = run(), run()
            apart = [relative_l2(one, other) for one, other in zip(got, want, strict=True)]
            same = all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
            right = max(apart) < LARGEST_ERROR and (same or way != "deterministic")
            yield {
                "case": f"{shape}, small", "way": way, "right": right, "runs_alike": same,
                "relative_l2": [float(f"{one:.2g}") for one in apart],
            }  # fmt: skip


def timed(name: str) -> Iterator[dict[str, Any]]:
    """Yield times of a variant, and how far its gradients are from Triton's."""
    from anymla.bench.gpu_timing import gpu_clock

    clock = gpu_clock()
    variant = variants()[name]
    for shape in SHAPES:
        call = Call(shape, clock.device)
        want = call.run("triton")
        for way in variant.ways:
            run = runs(variant, call, way)
            apart = [
                relative_l2(one, other)
                for one, other in zip(run(), want, strict=True)
                if len(one) == len(other)
            ]
            taken = clock.time_us([run] * 2, repetitions=5)
            yield {
                "case": str(shape), "way": way, "us": round(taken, 1),
                "tflops": round(shape.flop / taken / 1e6, 1),
                "relative_l2": [float(f"{one:.2g}") for one in apart],
            }  # fmt: skip
        del call, want
        clock.release()


def child(name: str, what: str, limit: float) -> list[dict[str, Any]]:
    """Run one variant in a process of its own; return its rows, the last one why it failed."""
    command = python_command("-m", "lab.gluon_backward", "--child", name, "--what", what)
    rows: list[dict[str, Any]] = []
    failed = ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env=os.environ | same_modules(),
        )
        output, failed = done.stdout, done.stderr[-800:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        failed = f"took longer than {limit:.0f} s"
    for line in output.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
    if failed:
        rows.append({"case": what, "failed": failed})
    return [{"part": PART, "variant": name} | row for row in rows]


def measured(seconds: float, limit: float) -> Iterator[dict[str, Any]]:
    """Yield rows of all variants: checks at once, then times of those that are right."""
    began = time.monotonic()
    names = list(variants())
    right = []
    with ThreadPoolExecutor(len(names)) as pool:
        check = functools.partial(child, what="check", limit=limit)
        for name, rows in zip(names, pool.map(check, names), strict=True):
            yield from rows
            if rows and all(row.get("right") for row in rows):
                right.append(name)
    for name in right:
        left = seconds - (time.monotonic() - began)
        if left > 0:
            yield from child(name, "time", min(limit, left))


def described(row: dict[str, Any]) -> str:
    """Return a row as a line for people."""
    if "failed" in row:
        return f"{row['variant']}: {row['case']} failed: {row['failed']}"
    numbers = f"{row['us']:9.1f} us {row['tflops']:6.1f} TFLOP/s" if "us" in row else ""
    verdict = {True: "right", False: "WRONG", None: ""}[row.get("right")]
    apart = ", ".join(f"{one:.1e}" for one in row["relative_l2"])
    return f"{row['variant']:68s} {row['case']:28s} {row['way']:14s} {numbers}{verdict} ({apart})"


@click.command()
@click.argument("path", type=Path, required=False)
@click.option("--seconds", default=540.0, show_default=True, help="Begin no variant after so long.")
@click.option("--limit", default=200.0, show_default=True, help="Seconds that a process may take.")
@click.option("--draw", is_flag=True, help="Only draw small inputs on the CPU, in a process.")
@click.option("--child", "name", type=click.Choice(list(variants())), hidden=True)
@click.option("--what", type=click.Choice(["check", "time", "draw"]), default="check", hidden=True)
def main(
    path: Path | None, seconds: float, limit: float, draw: bool, name: str | None, what: str
) -> None:
    """Check and time every configuration of the Hopper gradients, and keep the rows in a file."""
    if name is not None:
        if what == "time":
            rows = timed(name)
        elif what == "check":
            rows = checked(name, torch.device("cuda"))
        else:
            rows = drawn()
        with configured(variants()[name]):
            for row in rows:
                print(json.dumps(row), flush=True)
        return
    if draw:
        for row in child("triton", "draw", limit):
            print(json.dumps(row))
        return
    from anymla.bench.environment import environment
    from anymla.bench.gpu import device_facts
    from anymla.bench.report import append_lines

    facts = environment("python -m lab.gluon_backward") | device_facts()
    for row in measured(seconds, limit):
        print(described(row), flush=True)
        if path is not None:
            append_lines(path, [row | facts])


def drawn() -> Iterator[dict[str, Any]]:
    """Yield the sizes of small inputs, drawn on the CPU."""
    for shape in SMALL:
        call = Call(dataclasses.replace(shape, tokens=8), torch.device("cpu"))
        ragged(call)
        yield {
            "case": str(shape), "rows": list(call.rows.shape),
            "finite": bool(call.out.isfinite().all()),
        }  # fmt: skip


if __name__ == "__main__":
    main()
