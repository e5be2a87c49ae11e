"""Launches the CPU's GEMMs of few tokens (``_numba_gemm``): operands, and work for each thread."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import _numba_gemm
from anymla.ops._gemm import exact_in_bf16, rounded_to_fp8

# Bytes of a weight that pay for handing them to another thread (some 30 us), and parts a thread is
# given, so that one that the machine holds up has less to catch up.
_BYTES_A_PART, _PARTS_A_THREAD = 1 << 19, 4


@dataclasses.dataclass(frozen=True)
class Product:
    """``x @ weight^T`` of one weight as stored.

    Attributes:
        x: [T, K] of any float dtype up to 32 bits, K a multiple of 32; already quantised if the
            call quantises, and then exact in bfloat16.
        codes: uint8, e4m3 [N, K] or packed e2m1 [N, K/2].
        scale: [ceil(N/128), ceil(K/128)], uint8 or float32; or uint8 [N, K/32].
        fp8: which of the two.
        quantized: whether x was rounded to FP8.
    """

    x: Tensor
    codes: Tensor
    scale: Tensor
    fp8: bool
    quantized: bool = False


def multiply(products: Sequence[Product]) -> list[Tensor]:
    """The products in float32, each [T, N], by as many threads as torch has."""
    outs = [
        each.x.new_empty((len(each.x), len(each.codes)), dtype=torch.float32) for each in products
    ]
    calls = [_Call.of(each, out) for each, out in zip(products, outs, strict=True) if out.numel()]
    threads = torch.get_num_threads()
    nbytes = sum(each.nbytes for each in calls)
    if threads == 1 or nbytes < 2 * _BYTES_A_PART:
        for each in calls:
            each.run(0, each.rows)
        return outs
    part = max(_BYTES_A_PART, nbytes // (threads * _PARTS_A_THREAD))
    _run_together(collections.deque(_parts(calls, part)), threads)
    return outs


def packed_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    fp8: bool,
    quantize: bool = False,
    coded: QuantizedRows | None = None,
) -> Tensor:
    """``_gemm.fp8_gemm`` or ``_gemm.mxfp4_gemm``, to x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if coded is not None:
        rows = coded.decoded(len(rows), torch.bfloat16)
    elif quantize:
        rows = rounded_to_fp8(rows, torch.bfloat16)
    quantized = quantize or coded is not None
    (out,) = multiply([Product(rows, weight, scale, fp8, quantized)])
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel with its arrays."""

    kernel: Callable[..., None]
    arrays: tuple[Any, ...]
    rows: int
    nbytes: int

    @classmethod
    def of(cls, product: Product, out: Tensor) -> _Call:
        """Pick the operands: bfloat16 where they are exact and this processor multiplies it."""
        x, scale = product.x, product.scale
        narrow = x.dtype == torch.bfloat16 or product.quantized
        if narrow and _numba_gemm.has_bf16_dot() and exact_in_bf16(scale):
            operand = x.to(torch.bfloat16)
            if not product.fp8:
                operand = _numba_gemm.in_words(operand)
            name, operand = "bf16", operand.contiguous().view(torch.uint16)
        else:
            name, operand = "float32", x.to(torch.float32).contiguous()
        kernel = getattr(_numba_gemm, f"{'fp8' if product.fp8 else 'mxfp4'}_{name}")
        tensors = (product.codes.contiguous(), scale.contiguous(), operand, out)
        arrays = tuple(each.detach().numpy() for each in tensors)
        return cls(kernel, arrays, len(product.codes), product.codes.numel())

    def run(self, first: int, last: int) -> None:
        """Some rows of the weight; ``first`` a multiple of 128."""
        self.kernel(*self.arrays, first, last)


def _parts(calls: Sequence[_Call], nbytes: int) -> Iterator[tuple[_Call, int, int]]:
    """Cut calls into rows of about so many bytes, blocks of scales whole."""
    for call in calls:
        rows = nbytes * call.rows // call.nbytes
        step = max(1, rows // FP8_BLOCK) * FP8_BLOCK
        for first in range(0, call.rows, step):
            yield call, first, min(first + step, call.rows)


def _run_together(parts: collections.deque[tuple[_Call, int, int]], threads: int) -> None:
    """Run the parts in the calling thread and in others, whoever is free taking the next.

    A thread that does not get to run takes none, so that on a busy machine nobody waits for it.
    """

    def work() -> None:
        while True:
            try:
                call, first, last = parts.popleft()
            except IndexError:
                return
            call.run(first, last)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="anymla-gemm")


if hasattr(os, "register_at_fork"):  # threads do not survive it
    os.register_at_fork(after_in_child=_pool.cache_clear)
