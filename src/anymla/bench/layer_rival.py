"""The same decode layer assembled from others' kernels.

FlashMLA's attention, DeepGEMM's FP8 products and index scores with torch's top-k; without DeepGEMM,
cuBLAS's products. What they do not cover stays ours, unfused where this package fuses:
hyper-connections leave and enter in three operations, norms, rotations and insertions are
operations of their own, and activations are quantised by a launch of their own. Experts and the
grouped output projection are ours in both: DeepGEMM has no product of FP4 weights for Hopper, and
its batched FP8 product is for later GPUs. Only for benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anymla.layers import attention, codes, heads, hyper_connection, selection
from anymla.layers.hyper_connection import HyperConnection, Streams
from anymla.ops.hyper_connection import hc_post, hc_pre
from anymla.ops.kv_cache import quantize_and_insert_k_cache
from anymla.ops.linear import fp8_block_linear
from anymla.ops.norm_rope import rms_norm, rope
from anymla.ops.registry import Backend
from anymla.ops.selection import compute_global_topk_indices_and_lens
from anymla.ops.sparse_attention import sparse_attention

_LEAST_HEADS, _LIST_STEP = 64, 64
# DeepGEMM reads the scales of a run of channels in multiples of 16 bytes.
_TOKEN_STEP = 4


@contextlib.contextmanager
def rival_kernels(flash_mla: Any, deep_gemm: Any = None) -> Iterator[None]:
    """Layers that are called inside run on others' kernels.

    Args:
        flash_mla: a module with FlashMLA's functions.
        deep_gemm: DeepGEMM, or None.
    """
    with contextlib.ExitStack() as patches:
        attend = functools.partial(_attend, flash_mla, {})
        only = [Backend("flash_mla", attend, None)]
        patches.enter_context(sparse_attention.with_backends(only))
        vendor = fp8_block_linear.backends["vendor"]
        if deep_gemm is not None:
            product = functools.partial(_product, deep_gemm)
            vendor = Backend("deep_gemm", product, vendor.supports)
            select = functools.partial(_select, deep_gemm, {})
            patches.enter_context(mock.patch.object(selection, "select_topk", select))
            if hasattr(deep_gemm, "set_pdl"):  # its kernels can be launched early as well
                deep_gemm.set_pdl(True)
                patches.callback(deep_gemm.set_pdl, False)
        others = [each for each in fp8_block_linear.backends.values() if each.name != "vendor"]
        patches.enter_context(fp8_block_linear.with_backends([vendor, *others]))
        for module, name, unfused in (
            (hyper_connection, "hc_post_pre_norm", _post_pre_norm),
            (attention, "fused_q_kv_rmsnorm", _q_kv_norms),
            (attention, "qnorm_rope_kv_insert", _heads_and_row),
            (heads, "_in_one_kernel", lambda *_: False),
            (codes, "travel", lambda _: False),
        ):
            patches.enter_context(mock.patch.object(module, name, unfused))
        yield


def _attend(
    module: Any,
    schedules: dict[tuple[object, ...], Any],
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    out: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """``sparse_attention`` by FlashMLA; its schedule is made once for a shape, as engines do."""
    heads = q.shape[1]
    if heads < _LEAST_HEADS:
        q = torch.nn.functional.pad(q, (0, 0, 0, _LEAST_HEADS - heads))
        if sink is not None:
            sink = torch.nn.functional.pad(sink, (0, _LEAST_HEADS - heads), value=-torch.inf)
    more: dict[str, Any] = {"attn_sink": sink, "topk_length": lengths}
    if extra_cache is not None and extra_indices is not None:
        more["extra_k_cache"] = extra_cache.unsqueeze(2)
        more["extra_indices_in_kvcache"] = _in_steps(extra_indices).unsqueeze(1)
        more["extra_topk_length"] = extra_lengths
    shape = (*q.shape, *indices.shape, None if extra_indices is None else extra_indices.shape)
    if shape not in schedules:
        schedules[shape] = module.get_mla_metadata()[0]
    attended, lse = module.flash_mla_with_kvcache(
        q.unsqueeze(1), k_cache.unsqueeze(2), None, None, 512, schedules[shape], None,
        q.shape[2] ** -0.5 if scale is None else scale, False, True,
        _in_steps(indices).unsqueeze(1), **more,
    )  # fmt: skip
    attended = attended.squeeze(1)[:, :heads]
    return (attended if out is None else out.copy_(attended)), lse


def _in_steps(indices: Tensor) -> Tensor:
    """Lists of a width that FlashMLA takes."""
    short = -indices.shape[1] % _LIST_STEP
    return torch.nn.functional.pad(indices, (0, short), value=-1) if short else indices


def _product(
    module: Any, x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """``fp8_block_linear`` by DeepGEMM."""
    from anymla.ops.linear.triton_quantize import quantize_rows_mn_major

    assert quantize_activations
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    codes, x_scales = quantize_rows_mn_major(rows, _TOKEN_STEP)
    out = torch.empty(len(codes), len(weight), dtype=x.dtype, device=x.device)
    module.fp8_gemm_nt(
        (codes.view(torch.float8_e4m3fn), x_scales),
        (weight.contiguous().view(torch.float8_e4m3fn), scale.contiguous()),
        out,
    )
    return out[: len(rows)].view(*x.shape[:-1], -1)


def _select(
    module: Any,
    plans: dict[tuple[object, ...], Any],
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    k: int,
    *,
    max_context: int,
    out: Tensor,
    slot_table: Tensor,
    slot_page_size: int,
    slots: Tensor,
    counts: Tensor,
    backend: str | None = None,
    **_: Any,
) -> Tensor:
    """``select_topk`` of one token a request by DeepGEMM's scores and torch's top-k."""
    tokens = len(q)
    lengths = lengths.view(-1, 1)
    key = (tokens, max_context, lengths.data_ptr())
    if key not in plans:  # made once for a step
        everyone = torch.arange(tokens, dtype=torch.int32, device=q.device)
        sms = module.get_num_sms()
        page = index_cache.shape[1]
        plans[key] = (
            module.get_paged_mqa_logits_metadata(lengths, page, sms), everyone, everyone >= 0
        )  # fmt: skip
    plan, everyone, is_valid = plans[key]
    logits = module.fp8_paged_mqa_logits(
        q.unsqueeze(1), index_cache.unsqueeze(2), weights, lengths, block_table, plan, max_context,
        False,
    )  # fmt: skip
    out.copy_(logits.topk(k).indices)
    where = compute_global_topk_indices_and_lens(
        out, everyone, slot_table, slot_page_size, is_valid, backend=backend
    )
    slots.copy_(where[0])
    counts.copy_(where[1])
    return out


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
    """Enter a site as ``rival_kernels`` has it done, whose kernels are compiled by this."""
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


def flash_mla_module(find: Callable[[str], Any]) -> Any:
    """FlashMLA's functions, as vLLM ships them or by themselves.

    Args:
        find: imports a module by name.

    Raises:
        ImportError: there is neither.
    """
    try:
        return find("vllm.third_party.flashmla.flash_mla_interface")
    except ImportError:
        return find("flash_mla")


def deep_gemm_module(find: Callable[[str], Any]) -> Any:
    """DeepGEMM, or None where it is not installed.

    Args:
        find: imports a module by name.
    """
    try:
        return find("deep_gemm")
    except ImportError:
        return None
