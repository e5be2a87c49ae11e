"""Calls of prefill attention's gradients whose launches are what is built, and their judgement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymla.ops.attention import prefill_attention_backward
from anymla.ops.attention.prefill_backward_config import float32_fits
from anymla.ops.attention.prefill_shapes import (
    FLASH_ALL,
    FLASH_SELECTED,
    PRO_SELECTED,
    SPLIT_SELECTED,
    V32_SELECTED,
    PrefillShape,
)
from anymla.ops.device import Target
from lab.build import Build, Judgement, empty, float32

CHANNELS, V32_CHANNELS = 512, 576


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for shape in (FLASH_SELECTED, FLASH_ALL, PRO_SELECTED, SPLIT_SELECTED):
        yield f"gradients, {shape}", functools.partial(_differentiate, shape)
    for word, options in (
        ("deterministic", {"deterministic": True}),
        ("queries alone", {"gradients": "queries"}),
        ("with dlse and mass", {"extras": True}),
        ("float32", {"dtype": torch.float32}),
    ):
        label = f"gradients, {FLASH_SELECTED}, {word}"
        yield label, functools.partial(_differentiate, FLASH_SELECTED, **options)
    for shape, options in (
        (V32_SELECTED, {}),
        (FLASH_SELECTED, {"deterministic": True}),  # its window too
        (V32_SELECTED, {"dtype": torch.float32}),
    ):
        if target.arc_a or ("dtype" in options and not float32_fits(V32_CHANNELS, target)):
            continue
        words = ", ".join(f"{name} {value}" for name, value in options.items())
        label = f"gradients, {shape}, keys of {V32_CHANNELS} channels {words}".rstrip()
        yield label, functools.partial(_differentiate, shape, channels=V32_CHANNELS, **options)
    if target.name == "sm_90":
        yield from _hopper_calls()


def _hopper_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    calls: list[tuple[PrefillShape, dict[str, Any]]] = [
        (FLASH_SELECTED, {}),
        (FLASH_ALL, {}),
        (PRO_SELECTED, {}),
        (FLASH_SELECTED, {"deterministic": True}),
        (FLASH_SELECTED, {"gradients": "queries"}),
        (FLASH_SELECTED, {"gradients": "rows"}),
        (FLASH_SELECTED, {"dlse": True}),
        (FLASH_ALL, {"deterministic": True}),
        (FLASH_ALL, {"deterministic": True, "dlse": True}),
    ]
    for shape, options in calls:
        words = ", ".join(["Gluon", *(f"{name} {value}" for name, value in options.items())])
        made = functools.partial(_differentiate, shape, backend="gluon_sm90", **options)
        yield f"gradients, {shape}, {words}", made


def _differentiate(
    shape: PrefillShape,
    *,
    channels: int = CHANNELS,
    dtype: torch.dtype = torch.bfloat16,
    extras: bool = False,
    dlse: bool = False,
    deterministic: bool = False,
    gradients: str = "all",
    backend: str = "triton",
) -> None:
    tokens, heads = shape.tokens, shape.heads
    dout, out = (empty((tokens, heads, CHANNELS), dtype=dtype) for _ in range(2))
    q = empty((tokens, heads, channels), dtype=dtype)
    width = shape.topk or shape.entries
    prefill_attention_backward(
        dout, q, empty((shape.context, channels), dtype=dtype),
        empty((tokens, 4), dtype=torch.int32),
        empty((tokens, shape.topk), dtype=torch.int32) if shape.topk else None, out,
        float32((tokens, heads)), window=shape.window, entries=width, sink=float32(heads),
        dlse=float32((tokens, heads)) if extras or dlse else None, deterministic=deterministic,
        gradients=gradients, mass=float32((tokens, width)) if extras else None, backend=backend,
    )  # fmt: skip


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills and required matrix instructions of a build."""
    if build.name == "window_backward_kernel":
        return Judgement(matrix=True)
    if build.name == "prefill_backward_kernel":
        from anymla.ops.attention.gluon_sm90_prefill_backward_drows import COLUMNS

        # Beside addresses of rows, those of shared memory are kept outside of registers. Blocks of
        # 64 channels spill none, and are 3 % slower.
        spills = 66 if build.constants["ROWS"] == COLUMNS.value else 34
        return Judgement(matrix=True, spills=spills)
    if build.name in ("divided_backward_kernel", "divided_window_kernel"):
        # Accepted of RDNA; float32 has no matrix instructions, and torch is chosen.
        single = build.types["q_ptr"] == "*fp32"
        return Judgement(matrix=not single, spills=256 if single else 12)
    if build.name not in ("backward_kernel", "window_rows_kernel"):
        return Judgement()
    if build.types["q_ptr"] == "*fp32":
        # No matrix instructions; torch is chosen unless Triton is named.
        return Judgement(spills=900)
    # Sums of dq for 512 channels fill most registers.
    return Judgement(matrix=True, spills=100)
