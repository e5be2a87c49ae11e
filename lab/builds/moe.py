"""The experts' calls whose kernels are built, and the requirements on their code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.device import Target
from anymla.ops.moe.config import OPERANDS_IN_SHARED, choose_sm90_config
from anymla.ops.moe.interface import experts, route_biased, route_hash, swiglu
from anymla.ops.moe.shapes import (
    FLASH_ROUTER,
    MODELS,
    PRO_ROUTER,
    RANKS,
    ROUTER_TOKENS,
    ExpertFormats,
    ExpertsShape,
    flash,
    odd,
    pro,
    step_tokens,
    v41,
)
from anymla.ops.streams import deferred_stream_wait
from lab.build import Build, Judgement, dtype_name, empty, float32, int32, int64

_BF16, _FP16, _FP32, _U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
_VOCABULARY = 129_280
# Formats of V4 as released, and with float32 activations.
_V4 = ExpertFormats(_BF16, "mxfp4", _U8, True)
_V4_FORMATS = (_V4, ExpertFormats(_FP32, "mxfp4", _U8, False))
# Formats of V4.1 as released, and its quant blocks in FP8 experts.
_V41 = ExpertFormats(_BF16, "mxfp4", _U8, True, quant_block=32)
_OF_MODELS = (*((sized, _V4) for sized in MODELS.values()), (v41, _V41))
_V41_FORMATS = (_V41, ExpertFormats(_BF16, "fp8", _U8, True, quant_block=32))
# Other formats that the experts take, with the scales' dtype and a number of tokens for each tile.
_OTHER_FORMATS = (
    *((ExpertFormats(x, "mxfp4", _U8, True), _U8) for x in (_FP16, _FP32)),
    *((ExpertFormats(x, "mxfp4", _U8, False), _U8) for x in (_BF16, _FP16)),
    (ExpertFormats(_BF16, "fp8", _U8, True), _U8),
    (ExpertFormats(_FP16, "fp8", _U8, True), _U8),
    (ExpertFormats(_FP32, "fp8", _U8, True), _FP32),
    (ExpertFormats(_BF16, "fp8", _U8, False), _U8),
    (ExpertFormats(_FP16, "fp8", _U8, False), _FP32),
    (ExpertFormats(_FP32, "fp8", _U8, False), _U8),
    *((ExpertFormats(x, "plain", x, False), _U8) for x in (_BF16, _FP16, _FP32)),
    *((ExpertFormats(x, "nvfp4", _U8, False), _U8) for x in (_BF16, _FP16, _FP32)),
)
_ODD_FORMATS = (
    _V4,
    ExpertFormats(_BF16, "mxfp4", _U8, False),
    ExpertFormats(_BF16, "fp8", _U8, True),
)
_OTHER_TOKENS, _OTHER_EXPERTS = (1, 16, 512), 32


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls with meta tensors; on Hopper, also those that Triton's kernels take."""
    for tokens, (count, hidden) in itertools.product(ROUTER_TOKENS, (FLASH_ROUTER, PRO_ROUTER)):
        for x, gate in ((_BF16, _BF16), (_BF16, _FP32), (_FP16, _BF16), (_FP32, _FP32)):
            label = f"{count} experts, {tokens} tokens, {dtype_name(x)} x {dtype_name(gate)}"
            yield label, functools.partial(_route, tokens, count, hidden, x, gate)
    for x, width in itertools.product((_BF16, _FP16, _FP32), (2048, 2050)):
        for coded in (False, True) if x == _BF16 else (False,):
            label = f"{dtype_name(x)}, rows of {width}" + ", codes" * coded
            yield label, functools.partial(_swiglu, width, x, coded)
    if target.name == "sm_90":
        # The grouping of pairs depends on the number of experts, everything else on pairs an
        # expert.
        for (sized, formats), ranks in itertools.product(_OF_MODELS, RANKS[:-1]):
            count = sized(1).experts // ranks
            for shape in (sized(tokens, count) for tokens in step_tokens(sized, count)):
                if choose_sm90_config(shape, formats.quant_block) is not None:
                    yield _label(shape, formats), functools.partial(_experts, shape, formats)
        # Every block size of W4A8, with all experts on one device.
        sizes = itertools.product((flash, pro), (512, 1024, 2048, 4096))
        many = [(sized, _V4, tokens) for sized, tokens in sizes]
        for sized, formats, tokens in [*many, (v41, _V41, 512), (v41, _V41, 1024)]:
            call = functools.partial(_experts, sized(tokens), formats, "gluon_sm90")
            yield _label(sized(tokens), formats) + ", W4A8", call
        yield from _experts_calls(None)
        yield from _v41_calls(None)
        yield from _channels_calls(None)
    yield from _experts_calls("triton")
    yield from _v41_calls("triton")
    yield from _channels_calls("triton")
    # Sums over a token's experts: without a shared expert, or before its output is ready.
    for late in (False, True):
        shape, end = flash(1, _OTHER_EXPERTS), ", shared late" if late else ", none shared"
        call = functools.partial(_experts, shape, _V4, shared=late, late=late)
        yield _label(shape, _V4) + end, call


def _experts_calls(backend: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls of one GPU of several, which has few experts, then formats that V4 lacks."""
    end = "" if backend is None else ", Triton"
    for sized, tables in itertools.product(MODELS.values(), (False, True)):
        count = sized(1).experts // RANKS[-1]
        for tokens, formats in itertools.product(step_tokens(sized, count), _V4_FORMATS):
            shape = sized(tokens, count)
            call = functools.partial(_experts, shape, formats, backend, tables=tables)
            yield _label(shape, formats, tables) + end, call
    for tokens in _OTHER_TOKENS:
        shape, tables = flash(tokens, _OTHER_EXPERTS), tokens == 1
        for formats, scales in _OTHER_FORMATS:
            call = functools.partial(_experts, shape, formats, backend, scales, tables)
            yield _label(shape, formats, tables) + end, call
        for formats in _ODD_FORMATS:
            call = functools.partial(_experts, odd(tokens), formats, backend)
            yield _label(odd(tokens), formats) + end, call
    for shape in (odd(tokens, 1920) for tokens in (2, 64)):
        yield _label(shape, _V4) + end, functools.partial(_experts, shape, _V4, backend)


def _channels_calls(backend: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls of ranks with some channels of every expert (``model.build.shares_channels``)."""
    end = "" if backend is None else ", Triton"
    for sized, ranks in itertools.product(MODELS.values(), RANKS[1:]):
        whole = sized(1)
        if whole.inner % (ranks * 256):
            continue
        for tokens in step_tokens(sized, whole.experts):
            shape = dataclasses.replace(sized(tokens), inner=whole.inner // ranks)
            yield _label(shape, _V4) + end, functools.partial(_experts, shape, _V4, backend)


def _v41_calls(backend: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls with quant blocks of 32 channels, as in V4.1."""
    end = "" if backend is None else ", Triton"
    count = v41(1).experts // RANKS[-1]
    for tokens in step_tokens(v41, count):
        call = functools.partial(_experts, v41(tokens, count), _V41, backend)
        yield _label(v41(tokens, count), _V41) + end, call
    for tokens, formats in itertools.product(_OTHER_TOKENS, _V41_FORMATS):
        for shape in (v41(tokens, _OTHER_EXPERTS), odd(tokens)):
            call = functools.partial(_experts, shape, formats, backend)
            yield _label(shape, formats) + end, call


def _label(shape: ExpertsShape, formats: ExpertFormats, tables: bool = False) -> str:
    words = f"{shape.tokens} tokens, {shape.experts} experts of {shape.inner} x {shape.d}"
    words += f", {formats.weight} x {dtype_name(formats.x)}"
    words += f" in blocks of {formats.quant_block}" * (formats.quant_block != FP8_BLOCK)
    return words + ", quantised" * formats.quantized + ", tables" * tables


def _route(tokens: int, count: int, hidden: int, x: torch.dtype, gate: torch.dtype) -> None:
    """Route by bias, with and without padding tokens, and by a table of token ids."""
    given = empty((tokens, hidden), dtype=x), empty((count, hidden), dtype=gate)
    chosen, scale = flash(1).experts_per_token, 1.5
    for is_valid in (None, empty(tokens, dtype=torch.bool)):
        route_biased(*given, float32(count), k=chosen, scale=scale, is_valid=is_valid)
    route_hash(*given, int64(tokens), int64((_VOCABULARY, chosen)), scale=scale)


def _swiglu(width: int, x: torch.dtype, coded: bool) -> None:
    """Call SwiGLU on the two halves of one product's rows."""
    tokens = 8
    gate, up = empty((tokens, 2 * width), dtype=x).split(width, 1)
    codes: dict[str, Any] = {}
    if coded:
        rows = QuantizedRows.empty(tokens, width, gate.device)
        codes = {"codes": rows.codes, "code_scales": rows.scales}
    swiglu(gate, up, 10.0, **codes)


def _experts(
    shape: ExpertsShape,
    formats: ExpertFormats,
    backend: str | None = None,
    scales: torch.dtype = _U8,
    tables: bool = False,
    *,
    shared: bool = True,
    late: bool = False,
) -> None:
    """Run experts that are slices of one tensor or, with ``tables``, tensors anywhere in memory.

    Args:
        shape: sizes of the call.
        formats: dtypes and formats of activations and weights.
        backend: name of the backend to run, or None for the best.
        scales: dtype of the weights' scales.
        tables: True for separate tensors, so that kernels need tables of addresses.
        shared: True to add a shared expert's output.
        late: True if another stream still writes that output.
    """
    tokens, d, inner = shape.tokens, shape.d, shape.inner
    block = formats.quant_block
    of_rows = {"mxfp4": MXFP4_BLOCK, "nvfp4": NVFP4_BLOCK}
    packed = 2 if formats.weight in of_rows else 1
    rows, columns = (1, of_rows[formats.weight]) if packed == 2 else (block, block)

    def each(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
        made = empty((shape.experts + 1, n, k), dtype=dtype).unbind()
        return [made[0], *made[2:]] if tables else [*made[1:]]

    sizes = ((inner, d), (inner, d), (d, inner))
    weights = [each(n, k // packed, formats.stored) for n, k in sizes]
    factors: list[list[Tensor]] = [[], [], []]
    if formats.weight != "plain":
        factors = [each(-(-n // rows), -(-k // columns), scales) for n, k in sizes]
    pairs = (tokens, shape.experts_per_token)
    more: dict[str, Any] = {} if block == FP8_BLOCK else {"quant_block": block}
    if formats.weight == "nvfp4":
        more["global_scales"] = float32((shape.experts, 3))
    wait: Any = deferred_stream_wait(_nothing) if late else contextlib.nullcontext()
    with wait:
        experts(
            empty((tokens, d), dtype=formats.x), int32(pairs), float32(pairs),
            *weights, *factors,
            weight_format=formats.weight, swiglu_limit=10.0,
            quantize_activations=formats.quantized, backend=backend,
            shared=empty((tokens, d), dtype=formats.x) if shared else None,
            **more,
        )  # fmt: skip


def _nothing() -> None:
    """Do nothing, in place of a wait for a stream."""


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills and required matrix instructions of a build."""
    constants = build.constants
    if build.name == "grouped_gemm_kernel":
        return Judgement("e4m3")
    if build.name == "w4a8_sums_kernel":
        return Judgement("e4m3")
    if build.name == "w4a8_gemm_kernel":
        # Triton 3.7.1 spills in blocks of 128 pairs, where 3.6, with which they were timed, does
        # not; and in w2 of 512 channels, which was not timed: its loop has one round.
        one_round = constants["N"] == 64 and constants["K"] == 512
        return Judgement("e4m3", spills=4 if constants["N"] == 128 else 22 * one_round)
    if build.name == "logits_kernel":
        # sm_80 lacks a few registers outside of loops.
        return Judgement(build.types["x"] == build.types["gate"] != "*fp32", spills=8)
    if build.name not in ("gate_up_kernel", "down_kernel"):
        return Judgement()
    matrix = str(constants["OPERAND"]) != "fp32"
    if constants["SWAP_AB"]:
        # Triton 3.9 lacks a few registers for this tile; 3.6, with which it was timed, does not.
        wide = constants["WIDE_LOADS"] and constants["BLOCK_N"] == 128
        # Tiles of 64 rows, which are 4 to 6 % faster than those of 32 that do not spill.
        many = constants["BLOCK_M"] == 16 or constants["QUANT"] == 32
        shared_k = constants["K_WARPS"] > 0 and constants["BLOCK_N"] == 64 and many
        # A width of an odd number of quant blocks leaves one warp all 64 rows.
        alone = constants["K_WARPS"] == 1 and constants["BLOCK_N"] == 64
        return Judgement(matrix, spills=25 if wide else 16 if shared_k else 2 if alone else 0)
    # Operands that pass through registers make some kernels spill a few.
    few = 12 if "*fp32" in (build.types.get("s1"), build.types.get("s2")) else 8
    spills = 31 if target.narrow else 0 if target.name in OPERANDS_IN_SHARED else few
    return Judgement(matrix, spills=spills)
