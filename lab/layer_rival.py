"""The same decode layer assembled from others' kernels.

It has FlashMLA's attention, and DeepGEMM's FP8 products and index scores with torch's top-k;
without DeepGEMM, cuBLAS's products. Everything else stays ours, unfused where this package fuses:
hyper-connections leave and enter in three operations, norms, rotations and insertions are
operations of their own, and activations are quantised by a separate launch. Experts and the grouped
output projection are ours in both: DeepGEMM has no product of FP4 weights for Hopper, and its
batched FP8 product is for later GPUs. Only for benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anymla.layers import attention, codes, hyper_connection, selection
from anymla.layers.hyper_connection import HyperConnection, Streams
from anymla.ops.attention import sparse_attention
from anymla.ops.hyper_connection import hc_post, hc_pre
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.linear import fp8_block_linear
from anymla.ops.norm_rope import rms_norm, rope
from anymla.ops.registry import Backend
from lab.peers.deep_gemm import DeepGemm
from lab.peers.flash_mla import FlashMla


@contextlib.contextmanager
def rival_kernels(flash_mla: FlashMla, deep_gemm: DeepGemm | None = None) -> Iterator[None]:
    """Run layers that are called inside on others' kernels.

    Args:
        flash_mla: library that runs attention.
        deep_gemm: library that runs products and index scores, or None.
    """
    with contextlib.ExitStack() as patches:
        attend = functools.partial(flash_mla.attend, {})
        only = [Backend("flash_mla", attend, None)]
        patches.enter_context(sparse_attention.with_backends(only))
        vendor = fp8_block_linear.backends["vendor"]
        if deep_gemm is not None:
            vendor = Backend("deep_gemm", deep_gemm.product, vendor.supports)
            select = functools.partial(deep_gemm.select, {})
            patches.enter_context(mock.patch.object(selection, "select_topk", select))
            set_pdl = getattr(deep_gemm.module, "set_pdl", None)
            if set_pdl is not None:  # its kernels can be launched early as well
                set_pdl(True)
                patches.callback(set_pdl, False)
        others = [each for each in fp8_block_linear.backends.values() if each.name != "vendor"]
        patches.enter_context(fp8_block_linear.with_backends([vendor, *others]))
        for module, name, unfused in (
            (hyper_connection, "hc_post_pre_norm", _post_pre_norm),
            (attention, "fused_q_kv_rmsnorm", _q_kv_norms),
            (attention, "qnorm_rope_kv_insert", _heads_and_row),
            (codes, "supports_prequantized", lambda _: False),
        ):
            patches.enter_context(mock.patch.object(module, name, unfused))
        yield


def _q_kv_norms(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    return (
        rms_norm(qr, q_weight, eps, backend=backend),
        rms_norm(kv, kv_weight, eps, backend=backend),
    )


def _heads_and_row(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float,
    *,
    layout: str,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    heads = rms_norm(q, _ones(q.shape[-1], q.device), eps, backend=backend)
    row = rope(kv.unsqueeze(1), positions, cos_sin, backend=backend).squeeze(1)
    quantize_and_insert_k_cache(row, k_cache, slot_mapping, layout=layout, backend=backend)
    rotated: Tensor = rope(heads, positions, cos_sin, backend=backend)
    return rotated


@functools.cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, device=device)


def _post_pre_norm(
    u: Tensor,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    backend: str | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = hc_post(u, h, post, comb, backend=backend)
    y, post, comb = hc_pre(h, fn, base, scale, norm_eps=norm_eps, backend=backend, **options)
    return h, rms_norm(y, norm_weight, norm_eps, backend=backend), post, comb


def compile_unfused(site: HyperConnection, streams: Streams) -> None:
    """Enter a site as under ``rival_kernels``, to compile the kernels of that."""
    assert streams.output is not None
    assert streams.mix is not None
    _post_pre_norm(
        streams.output,
        streams.h,
        streams.mix.post,
        streams.mix.comb,
        site.fn,
        site.base,
        site.scale,
        site.norm,
        norm_eps=site.options.norm_eps,
        hc_eps=site.options.eps,
        iters=site.options.iterations,
        backend=site.backend,
    )
