"""Decode attention with its fused end beside the two steps apart, on a Hopper GPU.

The shapes, lists and protocol are those of ``flash_mla_decode``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.flash_mla_decode import Decode, Inputs, flash_mla, ours
from anymla.bench.gpu_timing import time_us
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.ops.sparse_attention import sparse_attention_fp8_quant

_POSITIONS, _TURNED, _GROUPS = 1 << 12, 64, 8


def shapes() -> Iterator[Decode]:
    """One query a request, most important first."""
    for heads, extra, batch in (
        (64, 512, 1), (64, 512, 8), (64, 512, 32), (64, 512, 128), (128, 1024, 1), (128, 1024, 32),
        (128, 1024, 128), (16, 512, 1), (16, 512, 32), (16, 512, 128), (64, 512, 64),
        (128, 1024, 64),
    ):  # fmt: skip
        yield Decode(batch, 1, heads, extra)


def compare(
    shape: Decode, module: Any | None, backend: str = "gluon_sm90", repetitions: int = 20
) -> dict[str, Any]:
    """One row: microseconds of attention alone, then the two steps, then the fused call.

    Args:
        shape: of the call.
        module: FlashMLA, or None to leave it out.
        backend: of attention.
        repetitions: replays that are timed.
    """
    inputs = Inputs.draw(shape)
    positions = torch.randint(0, _POSITIONS, (shape.batch * shape.rows,), device="cuda")
    table = torch.randn(_POSITIONS, _TURNED, device="cuda")
    groups = min(_GROUPS, shape.heads)

    def ended(call: Callable[[], Tensor]) -> Tensor:
        out = call()[:, : shape.heads] if shape.rows == 1 else call()
        result: tuple[Tensor, Tensor] = inverse_rope_fp8_quant(
            out.reshape(len(positions), shape.heads, -1), positions, table, n_groups=groups
        )  # fmt: skip
        return result[0]

    row: dict[str, Any] = {"label": shape.label, **dataclasses.asdict(shape), "backend": backend}
    calls = ours(inputs, backend)
    row["attention_microseconds"] = time_us(calls, repetitions)
    apart = [functools.partial(ended, call) for call in calls]
    row["apart_microseconds"] = time_us(apart, repetitions)
    fused = _fused(inputs, positions, table, groups, backend)
    row["microseconds"] = time_us(fused, repetitions)
    row["same_bytes"] = torch.equal(fused[0]().view(torch.uint8), apart[0]().view(torch.uint8))
    if module is not None and shape.heads >= _TURNED:
        peers = [
            functools.partial(ended, functools.partial(_rows, call))
            for call in flash_mla(inputs, module)
        ]
        row["flash_mla_microseconds"] = time_us(peers, repetitions)
        row["ratio"] = row["flash_mla_microseconds"] / row["microseconds"]
    return row


def _rows(call: Callable[[], Tensor]) -> Tensor:
    return call().flatten(0, 1)


def _fused(
    inputs: Inputs, positions: Tensor, table: Tensor, groups: int, backend: str
) -> list[Callable[[], Tensor]]:
    """Calls of the fused operation, with the arguments of the calls of attention."""
    calls: list[Callable[[], Tensor]] = []
    for call in ours(inputs, backend):
        assert isinstance(call, functools.partial)
        _, q, cache, window, lengths = call.args
        keywords = {name: value for name, value in call.keywords.items() if name != "out"}

        def fused(
            arguments: tuple[Any, ...] = (q, cache, window, lengths, positions, table),
            keywords: dict[str, Any] = keywords,
        ) -> Tensor:
            codes: Tensor = sparse_attention_fp8_quant(*arguments, n_groups=groups, **keywords)[0]
            return codes

        calls.append(fused)
    return calls
