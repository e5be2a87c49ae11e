"""Launch of the CPU's few-token GEMMs (``_numba_gemm``): operands, and work for each thread."""

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

# Fewest bytes of a weight that are worth another thread (some 30 us), and parts for each thread:
# with several parts, a thread that was descheduled delays the others less.
_BYTES_A_PART, _PARTS_A_THREAD = 1 << 19, 4


@dataclasses.dataclass(frozen=True)
class Product:
    """Operands of one product ``x @ weight^T`` with the weight as stored.

    Attributes:
        x: activations [T, K] of any float dtype up to 32 bits, K a multiple of 32. If
            ``quantized``, they were rounded to FP8 and are exact in bfloat16.
        codes: stored codes of the weight, uint8: e4m3 [N, K] or packed e2m1 [N, K/2].
        scale: scales of e4m3, uint8 or float32 [ceil(N/128), ceil(K/128)]; of e2m1, uint8 [N,
            K/32].
        fp8: True for an e4m3 weight, False for a packed e2m1 weight.
        quantized: True if x was rounded to FP8.
    """

    x: Tensor
    codes: Tensor
    scale: Tensor
    fp8: bool
    quantized: bool = False


def multiply(products: Sequence[Product]) -> list[Tensor]:
    """Compute the products in float32, each [T, N], with torch's number of threads."""
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
    """Compute ``_gemm.fp8_gemm`` or ``_gemm.mxfp4_gemm`` by numba's kernels, in x's dtype."""
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
    """Compiled kernel bound to the arrays of one product."""

    kernel: Callable[..., None]
    arrays: tuple[Any, ...]
    rows: int
    nbytes: int

    @classmethod
    def of(cls, product: Product, out: Tensor) -> _Call:
        """Choose the operands: bfloat16 where it is exact and this processor multiplies it."""
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
        """Compute rows ``first`` to ``last`` of the weight; ``first`` is a multiple of 128."""
        self.kernel(*self.arrays, first, last)


def _parts(calls: Sequence[_Call], nbytes: int) -> Iterator[tuple[_Call, int, int]]:
    """Cut the products into ranges of rows of about ``nbytes`` bytes, multiples of 128 rows."""
    for call in calls:
        rows = nbytes * call.rows // call.nbytes
        step = max(1, rows // FP8_BLOCK) * FP8_BLOCK
        for first in range(0, call.rows, step):
            yield call, first, min(first + step, call.rows)


def _run_together(parts: collections.deque[tuple[_Call, int, int]], threads: int) -> None:
    """Run all parts in the calling thread and in a pool; whichever thread is free takes the next.

    Threads that the system does not schedule take no part, so a busy machine delays nobody.
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


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
