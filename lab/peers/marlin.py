"""Marlin, as vLLM ships it: grouped products of bfloat16 activations by MXFP4 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymla.ops.moe import swiglu
from lab.peers import find_module, library_version, operations
from lab.peers.experts import BFLOAT16_BOUND, ExpertsPeer, Run, Weights, stacked

# vLLM's number of an e2m1 code, in the order of its fields: exponent, mantissa, sign, and so on.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
_TILE = 16
# Of a thread's eight values: the order of them in its int32.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BLOCKS_PER_SM = 4


class Marlin(ExpertsPeer):
    """vLLM's kernels for experts, of its compiled library."""

    name, title = "marlin", "vLLM's Marlin"
    modules = ("vllm._moe_C_stable_libtorch", "vllm._moe_C")
    bound = BFLOAT16_BOUND
    note = "activations bfloat16; SwiGLU between the products is this package's kernel"

    def __init__(
        self, library: Path | None = None, find: Callable[[str], Any] = find_module
    ) -> None:
        """Import nothing yet.

        Args:
            library: vLLM's compiled operations of experts; None for those of the vLLM that is
                installed.
            find: imports a module by name.
        """
        super().__init__(functools.partial(_operations, library, find))
        self._library = library

    def version(self) -> str | None:
        """Return vLLM's version, or a digest that identifies the library's file."""
        if self._library is not None:
            return library_version(self._library)
        try:
            return f"vllm {metadata.version('vllm')}"
        except metadata.PackageNotFoundError:
            return None

    def align(self, ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort pairs by expert; return them, each block's expert, and their number with padding."""
        most = ids.numel() + experts * (block - 1)
        if ids.numel() < experts:
            most = min(most, ids.numel() * block)
        new = functools.partial(torch.empty, dtype=torch.int32, device=ids.device)
        pairs, of_blocks, count = new(most), new(-(-most // block)), new(1)
        self.module.moe_align_block_size(ids, experts, block, pairs, of_blocks, count, None, None)
        return pairs, of_blocks, count

    def prepare(self, weights: Weights, limit: float) -> Run:
        """Repack weights for Marlin's tiles; see ``ExpertsPeer``."""
        codes, scales = {}, {}
        for name, parts in (("gate_up", ("1", "3")), ("down", ("2",))):
            matrices = stacked(weights, *(f"w{part}" for part in parts))
            codes[name] = torch.stack([pack_codes(each) for each in matrices])
            matrices = stacked(weights, *(f"s{part}" for part in parts))
            scales[name] = torch.stack([pack_scales(each) for each in matrices])
        count, inner = len(weights["w1"]), weights["w1"][0].shape[0]
        device = weights["w1"][0].device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        locks = torch.zeros(sms * _BLOCKS_PER_SM, dtype=torch.int32, device=device)

        def multiply(
            which: str, x: Tensor, aligned: tuple[Tensor, ...], routing: Tensor, block: int,
            copies: int, width: int,
        ) -> Tensor:  # fmt: skip
            out = torch.empty(x.shape[0] * copies, width, dtype=x.dtype, device=device)
            got: Tensor = self.module.moe_wna16_marlin_gemm(
                x, out, codes[which], None, scales[which], None, None, None, locks, *aligned,
                routing, block, copies, which == "down", _E2M1, x.shape[0], width, x.shape[1],
                False, True, False, -1, -1, -1,
            )  # fmt: skip
            return got

        def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
            k, block = ids.shape[1], block_rows(ids.numel() / count)
            aligned = self.align(ids, block, count)
            both = multiply("gate_up", x, aligned, routing, block, k, 2 * inner)
            given = swiglu(both[:, :inner], both[:, inner:], limit)
            each = multiply("down", given, aligned, routing, block, 1, x.shape[1])
            out = torch.empty_like(x)
            self.module.moe_sum(each.view(-1, k, x.shape[1]), out, None, None)
            return out

        return run


def block_rows(pairs_per_expert: float) -> int:
    """Return the rows of a block as vLLM chooses them: the least that most experts fill to 90 %."""
    return next((rows for rows in (8, 16, 32, 48) if pairs_per_expert / rows < 0.9), 64)


def _operations(library: Path | None, find: Callable[[str], Any], name: str) -> Any:
    if library is not None:
        torch.ops.load_library(library)
    else:
        find(name)
    return operations("_moe_C", "moe_wna16_marlin_gemm")


@functools.cache
def _code_order(device: torch.device) -> Tensor:
    """Return positions of an int32's values in four tiles of 16 x 16, eight values at a time."""
    order = [
        _TILE * (2 * (lane % 4) + down) + lane // 4 + right + _TILE * _TILE * tile
        for lane in range(32)
        for tile in range(4)
        for right in (0, 8)
        for down in (0, 1, 8, 9)
    ]
    return torch.tensor(order).view(-1, 8)[:, list(_ORDER)].flatten().to(device)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack MXFP4 codes [N, K/2] to int32 [K/16, 2N] in the order of Marlin's threads."""
    n, half = codes.shape
    values = torch.stack((codes & 15, codes >> 4), -1).view(n, 2 * half).T
    tiles = values.reshape(2 * half // _TILE, _TILE, n // _TILE, _TILE).transpose(1, 2)
    order = _code_order(codes.device)
    words = tiles.reshape(-1, len(order))[:, order].reshape(-1, 4, 2)
    return (words[..., 0] | words[..., 1] << 4).view(torch.int32).view(2 * half // _TILE, 2 * n)


def pack_scales(scales: Tensor) -> Tensor:
    """Transpose scales [N, K/32] to e8m0 [K/32, N], rows in the order that a thread reads."""
    steps = scales.T.reshape(-1, 8, 8).transpose(1, 2).reshape(-1, 4)
    in_order = steps[:, [0, 2, 1, 3]].reshape(scales.shape[1], scales.shape[0])
    return in_order.contiguous().view(torch.float8_e8m0fnu)
