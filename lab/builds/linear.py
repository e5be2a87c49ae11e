"""The linear layers' calls whose kernels are built, and the requirements on their code."""

from __future__ import annotations

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
from anymla.ops.device import Target
from anymla.ops.linear.config import MAX_EXACT_TOKENS
from anymla.ops.linear.interface import (
    fp8_block_linear,
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
    linear_float32,
    mxfp4_linear,
    nvfp4_linear,
)
from anymla.ops.linear.shapes import (
    MODELS,
    ODD,
    RANKS,
    TOKENS,
    V4_FLASH,
    V41_FLASH,
    V41_NGRAMS,
    LayerShape,
    ProductShape,
)
from lab.build import Build, Judgement, dtype_name, empty, float32, uint8

_ROPE_DIM = 64


@dataclasses.dataclass(frozen=True)
class _Formats:
    """Format of a stored weight, and dtype and quantisation of the activations it multiplies."""

    weight: str
    scales: torch.dtype
    x: torch.dtype
    quantized: bool
    block: int = FP8_BLOCK

    def __str__(self) -> str:
        names = [f"{self.weight} x {dtype_name(self.x)}"]
        names += [f"blocks of {self.block}"] * (self.block != FP8_BLOCK)
        names += ["quantised"] * self.quantized
        names += ["float32 scales"] * (self.scales == torch.float32)
        return ", ".join(names)


_FLOATS = _BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_U8 = torch.uint8
# Formats of V4 as released, with float32 activations, and with NVFP4 attention; scales as CUDA
# devices store them.
_V4_FP8 = _Formats("fp8", _FP32, _BF16, True)
_V4_NVFP4 = _Formats("nvfp4", _U8, _BF16, False)
_V4_FORMATS = (_V4_FP8, _Formats("fp8", _FP32, _FP32, False), _V4_NVFP4)
# Formats of V4.1 as released, with float32 activations, and with scales as checkpoints store them.
_V41_FP8 = _Formats("fp8", _FP32, _BF16, True, 32)
_V41_FORMATS = (_V41_FP8, _Formats("fp8", _FP32, _FP32, False, 32))
_V41_OTHER_FORMATS = (
    _Formats("fp8", _U8, _BF16, True, 32),
    _Formats("mxfp4", _U8, _BF16, True, 32),
)
# Other formats that the operations take, with a number of tokens for each tile.
_OTHER_FORMATS = (
    _Formats("fp8", _U8, _BF16, True),
    _Formats("fp8", _U8, _FP16, True),
    _Formats("fp8", _FP32, _FP32, True),
    _Formats("fp8", _U8, _BF16, False),
    _Formats("fp8", _FP32, _FP16, False),
    *(_Formats("mxfp4", _U8, x, quantized) for x in _FLOATS for quantized in (True, False)),
    _Formats("nvfp4", _U8, _FP16, False),
    _Formats("nvfp4", _U8, _FP32, False),
)
_ODD_FORMATS = (_V4_FP8, _Formats("mxfp4", _U8, _BF16, True), _V4_NVFP4)
_OTHER_TOKENS = (1, 16, 32, 64, 128, 512, 4096)


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls with meta tensors; on Hopper, also those that Triton's kernels take."""
    if target.name == "sm_90":
        for sizes, tokens in itertools.product(MODELS.values(), TOKENS):
            if tokens <= MAX_EXACT_TOKENS:
                for product in sizes.compressors:
                    yield f"{product}, {tokens} tokens", functools.partial(_bf16, product, tokens)
    for backend in (None, "triton") if target.name == "sm_90" else ("triton",):
        end = "" if backend is None else ", Triton"
        for product, tokens, formats in itertools.product(_products(), TOKENS, _V4_FORMATS):
            call = functools.partial(_multiply, product, tokens, formats, backend)
            yield f"{product}, {tokens} tokens, {formats}{end}", call
        for sizes, ranks, tokens in itertools.product(MODELS.values(), RANKS, TOKENS):
            heads, groups = sizes.heads // ranks, sizes.groups // ranks
            call = functools.partial(_project, sizes, ranks, tokens, backend)
            yield f"{heads} heads in {groups} groups, {tokens} tokens{end}", call
        product = V4_FLASH.draft
        for tokens, formats in itertools.product(_OTHER_TOKENS, _OTHER_FORMATS):
            call = functools.partial(_multiply, product, tokens, formats, backend)
            yield f"{product}, {tokens} tokens, {formats}{end}", call
        for tokens, formats in itertools.product(_OTHER_TOKENS, _ODD_FORMATS):
            call = functools.partial(_multiply, ODD, tokens, formats, backend)
            yield f"{ODD}, {tokens} tokens, {formats}{end}", call
        for tokens, dtype in itertools.product(_OTHER_TOKENS, (_FP16, _FP32)):
            call = functools.partial(_project, V4_FLASH, 1, tokens, backend, dtype, _U8)
            yield f"{V4_FLASH.heads} heads, {tokens} tokens, {dtype_name(dtype)}{end}", call
        yield from _v41_calls(backend, end)


def _v41_calls(backend: str | None, end: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls with quant blocks of 32 channels, as in V4.1."""
    whole = [product for product in V41_FLASH.products() if not product.groups]
    products = (*whole, V41_FLASH.index_query, V41_NGRAMS)
    for product, tokens, formats in itertools.product(products, TOKENS, _V41_FORMATS):
        call = functools.partial(_multiply, product, tokens, formats, backend)
        yield f"V4.1 {product}, {tokens} tokens, {formats}{end}", call
    others = (V41_FLASH.index_query, _V41_OTHER_FORMATS), (ODD, (_V41_FP8, *_V41_OTHER_FORMATS))
    for (product, formats_of), tokens in itertools.product(others, _OTHER_TOKENS):
        for formats in formats_of:
            call = functools.partial(_multiply, product, tokens, formats, backend)
            yield f"{product}, {tokens} tokens, {formats}{end}", call
    if backend is not None:
        for tokens in (1, 4096):
            call = functools.partial(_quantize_heads, tokens)
            yield f"V4.1 {V4_FLASH.heads} heads, {tokens} tokens", call


def _products() -> list[ProductShape]:
    """List V4's linear layers in FP8, one of each shape."""
    found: dict[tuple[int, int], ProductShape] = {}
    for sizes, ranks in itertools.product(MODELS.values(), RANKS):
        for product in (*sizes.products(ranks), sizes.index_query, sizes.draft):
            if not product.groups:
                found.setdefault((product.n, product.k), product)
    return list(found.values())


def _multiply(product: ProductShape, tokens: int, formats: _Formats, backend: str | None) -> None:
    n, k, block = product.n, product.k, formats.block
    x = empty((tokens, k), dtype=formats.x)
    named: dict[str, Any] = {} if block == FP8_BLOCK else {"quant_block": block}
    if formats.weight == "nvfp4":
        scales = uint8((n, k // NVFP4_BLOCK))
        nvfp4_linear(x, uint8((n, k // 2)), scales, float32(1), backend=backend)
    elif formats.weight == "mxfp4":
        mxfp4_linear(
            x, uint8((n, k // 2)), uint8((n, k // MXFP4_BLOCK)),
            quantize_activations=formats.quantized, backend=backend, **named,
        )  # fmt: skip
    else:
        fp8_block_linear(
            x, uint8((n, k)), empty((-(-n // block), -(-k // block)), dtype=formats.scales),
            quantize_activations=formats.quantized, backend=backend, **named,
        )  # fmt: skip


def _block_scales(n: int, k: int, dtype: torch.dtype, *groups: int) -> Tensor:
    return empty((*groups, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)), dtype=dtype)


def _project(
    sizes: LayerShape,
    ranks: int,
    tokens: int,
    backend: str | None,
    dtype: torch.dtype = _BF16,
    scales: torch.dtype = _FP32,
) -> None:
    """Call the grouped output projection of one GPU's heads, in FP8 and unquantised."""
    product = sizes.output_projection(ranks)
    n, k, groups = product.n, product.k, product.groups
    heads = (
        empty((tokens, sizes.heads // ranks, sizes.head_dim), dtype=dtype),
        empty(tokens, dtype=torch.int64),
        float32((4096, _ROPE_DIM)),
    )
    codes, code_scales = inverse_rope_fp8_quant(*heads, n_groups=groups)
    grouped_output_projection_fp8(
        codes, code_scales, uint8((groups, n, k)), _block_scales(n, k, scales, groups),
        out_dtype="bf16" if dtype == _BF16 else "fp32", backend=backend,
    )  # fmt: skip
    grouped_output_projection(*heads, empty((groups, n, k), dtype=dtype), backend="triton")


def _quantize_heads(tokens: int) -> None:
    """Rotate heads back and quantise them in blocks of 32 channels."""
    size = (tokens, V4_FLASH.heads, V4_FLASH.head_dim)
    inverse_rope_fp8_quant(
        empty(size, dtype=_BF16), empty(tokens, dtype=torch.int64), float32((4096, _ROPE_DIM)),
        n_groups=V4_FLASH.groups, quant_block=32, backend="triton",
    )  # fmt: skip


def _bf16(product: ProductShape, tokens: int) -> None:
    x, weight = (empty((rows, product.k), dtype=_BF16) for rows in (tokens, product.n))
    linear_float32(x, weight, backend="gluon_sm90")


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills and required matrix instructions of a build."""
    if build.name == "fp8_wgmma_kernel":
        return Judgement("e4m3")
    if build.name.startswith("warp_split"):
        # Triton 3.7 spills some of four quant blocks' scales in the tile with the most sums.
        most = build.constants.get("QUANT") == 32 and build.constants["BLOCK_M"] == 32
        spills = 10 if most else 0
        return Judgement("bf16" if build.constants.get("BF16") else "fp16", spills)
    if build.name == "gemm_swap_ab_kernel":
        # Operands that pass through registers spill a few where a CTA has 99 KiB of shared memory,
        # and on sm_100 with groups.
        few = target.shared_bytes < 100 << 10
        few |= target.name == "sm_100" and "groups" not in build.constants
        return Judgement(matrix=True, spills=10 if few else 0)
    if build.name == "gemm_kernel":
        return Judgement(str(build.constants["OPERAND"]) != "fp32", _gemm_spills(build, target))
    return Judgement()


def _gemm_spills(build: Build, target: Target) -> int:
    tokens = build.constants["BLOCK_M"]
    if tokens == 128:
        # Wide operands are computed, not loaded, and lack some registers for this tile. Numbers of
        # rows that are not multiples of 16 are addressed one by one at the end.
        return 64 if target.name == "sm_80" else 0 if "n" in build.divisible else 80
    return 8 if tokens == 64 and target.name in ("sm_80", "sm_86") else 0
