"""Time the gradients of prefill attention in several tiles, and check them on the device first.

``python -m lab.backward_tiles [ROWS.jsonl]`` prints a table and stops beginning variants after
``--seconds``. With ``--cudnn`` the chosen tile is timed next to cuDNN frontend, on the same inputs.
Rows are 4,096 queries at the end of a sequence; neighbours select alike, as a trained indexer does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.gpu_timing import gpu_clock
from anymla.bench.report import append_lines
from anymla.ops.attention import prefill_attention, prefill_attention_backward
from anymla.ops.attention import triton_prefill_backward_launch as launch
from anymla.ops.attention.prefill_backward_config import (
    BackwardConfig,
    choose_config,
    gluon_backward_support,
)
from anymla.ops.device import target_of
from anymla.testing.tolerance import relative_l2
from lab.peers.cudnn import CudnnFrontend

WINDOW, ENTRIES, CHANNELS = 128, 8192, 512


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of one call: queries, heads, and entries selected for each query, or 0 for the window.

    Attributes:
        whole: number of entries that every query sees without lists, in place of ``topk``.
    """

    heads: int
    topk: int
    whole: int = 0
    tokens: int = 4096

    @property
    def flop(self) -> int:
        """Operations of the five products over all named rows."""
        columns = WINDOW + self.topk + self.whole
        return 10 * self.tokens * self.heads * columns * CHANNELS

    def __str__(self) -> str:
        return f"{self.heads} heads, {WINDOW} + {self.topk or self.whole}"


SHAPES = (
    Shape(64, 512),
    Shape(64, 0),
    Shape(64, 2048),
    Shape(128, 1024),
    Shape(64, 1024),
    Shape(64, 0, 256),
)


def tiles(chosen: BackwardConfig) -> Iterator[BackwardConfig]:
    """Yield the tile that is chosen, then others; those that do not fit a device raise there."""
    yield chosen
    for heads, rows, warps, stages, parts in (
        (64, 64, 8, 1, 4), (64, 32, 8, 1, 2), (64, 16, 8, 3, 4), (64, 16, 8, 2, 4),
        (32, 32, 8, 2, 4), (32, 32, 8, 1, 1), (32, 32, 8, 2, 2), (32, 16, 8, 2, 4),
        (32, 16, 8, 1, 1), (16, 32, 8, 2, 4), (16, 32, 8, 1, 1), (16, 16, 4, 1, 1),
    ):  # fmt: skip
        tile = dataclasses.replace(
            chosen, heads=heads, rows=rows, num_warps=warps, num_stages=stages, parts=parts,
            transposed=chosen.transposed and heads == 64,
        )  # fmt: skip
        if tile != chosen and (heads == 64 or not chosen.transposed):
            yield tile


class Call:
    """Inputs of a shape on a device, and the gradients of them."""

    def __init__(self, shape: Shape, device: torch.device, *, channels: int = CHANNELS) -> None:
        """Draw the inputs and compute the output."""
        tokens = shape.tokens
        token = torch.arange(tokens, device=device)
        first = tokens + WINDOW - 1
        draw = functools.partial(torch.randn, device=device)
        self.q, self.dout = (draw(tokens, shape.heads, channels).bfloat16() for _ in range(2))
        self.rows = draw(first + ENTRIES, channels).bfloat16()
        self.lists: torch.Tensor | None = None
        more = shape.topk or shape.whole
        if shape.topk:
            part = (token % 64 / 64).unsqueeze(1)
            slow = torch.rand(tokens // 64 + 2, ENTRIES, device=device)
            score = slow[token // 64] * (1 - part) + slow[token // 64 + 1] * part
            score += 0.03 * torch.rand(tokens, ENTRIES, device=device)
            self.lists = score.topk(shape.topk, 1).indices.sort(1).values.int()
        same = torch.ones_like(token)
        self.ranges = torch.stack((token, WINDOW * same, first * same, more * same), 1).int()
        self.options: dict[str, Any] = {
            "window": WINDOW,
            "entries": more,
            "sink": draw(shape.heads),
        }
        self.attend()

    def attend(self) -> None:
        """Compute the output of the inputs as they are."""
        self.out, self.lse = prefill_attention(
            self.q, self.rows, self.ranges, self.lists, **self.options
        )

    def run(self, backend: str = "triton", **more: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients by a backend."""
        return prefill_attention_backward(
            self.dout, self.q, self.rows, self.ranges, self.lists, self.out, self.lse,
            **self.options, **more, backend=backend,
        )  # fmt: skip


def checked(device: torch.device, shape: Shape, *, channels: int = CHANNELS) -> list[str]:
    """Compare small gradients with torch's in float32, and two deterministic runs bit by bit."""
    call = Call(shape, device, channels=channels)
    want = call.run("torch")
    lines = []
    ways: dict[str, dict[str, Any]] = {"atomics": {}, "in order": {"deterministic": True}}
    for word, more in ways.items():
        got, again = call.run(**more), call.run(**more)
        apart = list(itertools.starmap(relative_l2, zip(got, want, strict=True)))
        same = all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
        assert max(apart) < 1e-2, (word, apart)
        assert same or not more, word
        words = ", ".join(
            f"{name} {value:.1e}"
            for name, value in zip(("dq", "drows", "dsink"), apart, strict=True)
        )
        lines.append(f"{shape}, {word}: {words}; two runs {'alike' if same else 'differ'}")
    return lines


def measured(
    device: torch.device,
    clock: Any,
    shapes: tuple[Shape, ...] = SHAPES,
    seconds: float = 170,
    channels: int = CHANNELS,
    *,
    alone: bool = False,
    peer: CudnnFrontend | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape and way, until the time is over; ``alone`` omits other tiles.

    With ``alone``, Hopper's own kernels are timed as well. Rows of the chosen tile say how far dq,
    drows and dsink are from torch's, as relative L2, and with a peer also its time and distances.
    """
    from triton.runtime.errors import OutOfResources

    began = time.monotonic()
    for shape in shapes:
        call = Call(shape, device, channels=channels)
        chosen = choose_config(shape.heads, torch.bfloat16, target_of(device))
        named: list[dict[str, Any]] = [{}, {"deterministic": True}, {"gradients": "queries"}]
        ways = [(chosen, more) for more in named]
        if alone and gluon_backward_support(call.dout, call.q, call.rows):
            ways += [(chosen, {"backend": "gluon_sm90", **more}) for more in named]
        if not alone:
            ways += [(tile, {}) for tile in tiles(chosen) if tile != chosen]
        want = call.run("torch")
        theirs = {} if peer is None else _beside(clock, peer.gradients(call), want)
        for tile, more in sorted(ways, key=lambda way: way != (chosen, {})):
            if time.monotonic() - began > seconds:
                return
            run: Callable[[], Any] = functools.partial(call.run, **more)
            with mock.patch.object(launch, "choose_config", return_value=tile):
                apart: dict[str, Any] = {}
                if tile == chosen and "gradients" not in more:
                    errors = itertools.starmap(relative_l2, zip(run(), want, strict=True))
                    apart = {"relative_l2": [float(f"{one:.2g}") for one in errors]}
                try:
                    taken = clock.time_us([run] * 2, repetitions=5)
                except OutOfResources:
                    continue
            yield {
                "part": "gradients of prefill attention", "case": str(shape),
                **({} if "backend" in more else {"tile": dataclasses.astuple(tile)}),
                "chosen": tile == chosen, **more,
                "us": round(taken, 1), "tflops": round(shape.flop / taken / 1e6, 1), **apart,
                **(theirs if tile == chosen and not more.keys() - {"backend"} else {}),
            }  # fmt: skip
        del call, want
        clock.release()


def _beside(clock: Any, run: Callable[[], Any], want: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Return fields of a peer's gradients: its time, and how far they are from torch's."""
    errors = list(itertools.starmap(relative_l2, zip(run(), want, strict=True)))
    taken = clock.time_us([run] * 2, repetitions=5)
    return {
        "cudnn_frontend_us": round(taken, 1),
        "cudnn_frontend_relative_l2": [float(f"{one:.2g}") for one in errors],
    }


@click.command()
@click.argument("path", type=Path, required=False)
@click.option("--seconds", default=170.0, show_default=True, help="Begin nothing after so long.")
@click.option("--chosen", is_flag=True, help="Time the chosen tiles and Hopper's kernels.")
@click.option("--cudnn", is_flag=True, help="Next to cuDNN frontend.")
def main(path: Path | None, seconds: float, chosen: bool, cudnn: bool) -> None:
    """Check small gradients, then print the times of all variants, and keep them in a file."""
    peer = CudnnFrontend() if cudnn else None
    if peer is not None:
        peer.require("--cudnn")
    clock = gpu_clock()
    facts = environment("python -m lab.backward_tiles") | device_facts()
    facts |= {} if peer is None else {peer.name: peer.version()}
    for shape in (Shape(64, 160, tokens=64), Shape(20, 0, 40, tokens=64)):
        print(*checked(clock.device, shape), sep="\n", flush=True)
    for row in measured(clock.device, clock, seconds=seconds, alone=chosen, peer=peer):
        way = [f"{name}={row[name]}" for name in ("deterministic", "gradients") if name in row]
        way += ["Gluon"] * ("backend" in row)
        tile = "x".join(map(str, row.get("tile", ())[:5])) + " (chosen)" * row["chosen"]
        print(
            f"{row['case']:24s} {tile:38s} {row['us']:9.1f} us {row['tflops']:6.1f} TFLOP/s",
            *way,
            row.get("relative_l2", ""),
            *(f"cuDNN frontend {us} us" for us in [row.get("cudnn_frontend_us")] if us),
            flush=True,
        )
        if path is not None:
            append_lines(path, [row | facts])


if __name__ == "__main__":
    main()
