"""The same decode layer from others' kernels: FlashMLA's attention, cuBLAS's FP8 products.

What they do not cover stays ours, unfused where this package fuses: hyper-connections leave and
enter in three operations, and activations are quantised by a launch of their own. Only for
benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anymla.layers import hyper_connection
from anymla.layers.hyper_connection import HyperConnection, Streams
from anymla.ops._operation import Backend, Operation
from anymla.ops.hyper_connection import hc_post, hc_pre
from anymla.ops.linear import fp8_block_linear
from anymla.ops.norm_rope import rms_norm
from anymla.ops.sparse_attention import sparse_attention

_LEAST_HEADS, _LIST_STEP = 64, 64


@contextlib.contextmanager
def rival_kernels(flash_mla: Any) -> Iterator[None]:
    """Layers that are called inside run on others' kernels.

    Args:
        flash_mla: a module with FlashMLA's functions.
    """
    with contextlib.ExitStack() as patches:
        attend = functools.partial(_attend, flash_mla, {})
        _use(patches, sparse_attention, Backend("flash_mla", attend, None))
        vendor = fp8_block_linear.backends["vendor"]
        choose = fp8_block_linear._choose

        def library(name: str | None, args: Any, kwargs: Any) -> Backend:
            return vendor if vendor.support(args, kwargs) else choose(name, args, kwargs)

        patches.enter_context(mock.patch.object(fp8_block_linear, "_choose", library))
        patches.enter_context(mock.patch.object(fp8_block_linear, "_host", None))
        patches.enter_context(
            mock.patch.object(hyper_connection, "hc_post_pre_norm", _post_pre_norm)
        )
        yield


def _use(patches: contextlib.ExitStack, operation: Operation, backend: Backend) -> None:
    patches.enter_context(mock.patch.object(operation, "_choose", return_value=backend))
    patches.enter_context(mock.patch.object(operation, "_host", None))


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


def unfused_site(site: HyperConnection, streams: Streams) -> None:
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
