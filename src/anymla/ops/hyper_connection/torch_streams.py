"""Hyper-connections on any torch device; tokens go through in blocks that bound the scratch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from anymla.ops._quantized import fill_codes
from anymla.ops.hyper_connection import torch_few
from anymla.ops.hyper_connection.reference import wide
from anymla.ops.hyper_connection.torch_sinkhorn import sinkhorn

# Elements of a block of streams, which is copied to float32: 4 MiB stay in a CPU's cache, 256 MiB
# keep a GPU busy.
_CPU_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 26


def _block_tokens(h: Tensor) -> int:
    elements = _CPU_BLOCK if h.device.type == "cpu" else _DEVICE_BLOCK
    return max(1, elements // max(1, h.shape[1] * h.shape[2]))


@functools.cache
def _scale_of_row(n: int, device: torch.device) -> Tensor:
    """Which of the three scales each of fn's (2 + N) N rows takes."""
    return torch.tensor([0] * n + [1] * n + [2] * (n * n), device=device)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    eps_tensor = _constant(eps, x.dtype, x.device)
    return torch.addcmul(eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _pre_few(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, d = h.shape
    f = h.reshape(tokens, n * d).to(wide(h.dtype))
    gates = torch_few.gates(
        functional.linear(f, fn.to(f.dtype)),
        torch.linalg.vector_norm(f, dim=-1),
        base,
        scale,
        channels=n * d,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        iters=iters,
    )
    y = _collapse(f, gates[:, :n], h.dtype)
    return y, gates[:, n : 2 * n], gates[:, 2 * n :].view(tokens, n, n)


def _mix(f: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    return functional.linear(f, fn.to(f.dtype)).mul_(_inverse_rms(f, norm_eps))


def _collapse(f: Tensor, pre: Tensor, dtype: torch.dtype) -> Tensor:
    n = pre.shape[1]
    if len(pre) == 1:
        return torch.mm(pre, f.view(n, -1)).to(dtype)
    streams = f.view(f.shape[0], n, f.shape[1] // n)
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1).to(dtype)


def _pre_block(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, _ = h.shape
    f = h.reshape(tokens, fn.shape[1]).to(wide(h.dtype))
    gates = torch.addcmul(base, _mix(f, fn, norm_eps), scale)
    pre = gates[:, :n].sigmoid().add_(hc_eps)
    post = gates[:, n : 2 * n].sigmoid().mul_(2)
    comb = sinkhorn(gates[:, 2 * n :].view(tokens, n, n), eps=hc_eps, iters=iters)
    return _collapse(f, pre, h.dtype), post, comb


def _pre(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    if torch_few.suits(h, norm_eps, hc_eps):
        return _pre_few(h, fn, base, scale, norm_eps, hc_eps, iters)
    tokens, n, d = h.shape
    dtype = wide(h.dtype)
    scale_rows = scale.index_select(0, _scale_of_row(n, h.device)).to(dtype)
    base = base.to(dtype)
    block = _block_tokens(h)
    if tokens <= block:
        return _pre_block(h, fn, base, scale_rows, norm_eps, hc_eps, iters)
    y = h.new_empty((tokens, d))
    post = h.new_empty((tokens, n), dtype=dtype)
    comb = h.new_empty((tokens, n, n), dtype=dtype)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        y[part], post[part], comb[part] = _pre_block(
            h[part], fn, base, scale_rows, norm_eps, hc_eps, iters
        )
    return y, post, comb


def hc_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See interface.hc_pre."""
    y, post, comb = _pre(h, fn, base, scale, norm_eps, hc_eps, iters)
    if norm_weight is not None:
        x = y.to(post.dtype)
        y = (x * _inverse_rms(x, norm_eps)).mul_(norm_weight).to(h.dtype)
    fill_codes(y, codes, code_scales)
    return y, post, comb


def _post_block(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.bmm(comb.transpose(1, 2), h.to(comb.dtype))
    return mixed.addcmul_(post.unsqueeze(2), u.unsqueeze(1)).to(h.dtype)


def hc_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See interface.hc_post."""
    tokens = h.shape[0]
    block = _block_tokens(h)
    if tokens <= block:
        return _post_block(u, h, post, comb)
    streams = torch.empty_like(h, memory_format=torch.contiguous_format)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        streams[part] = _post_block(u[part], h[part], post[part], comb[part])
    return streams


def hc_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """See interface.hc_head."""
    tokens, _, d = h.shape
    dtype = wide(h.dtype)
    base, scale = base.to(dtype), scale.to(dtype)
    y = h.new_empty((tokens, d))
    block = _block_tokens(h)
    for start in range(0, tokens, block):
        f = h[start : start + block].flatten(1).to(dtype)
        pre = torch.addcmul(base, _mix(f, fn, norm_eps), scale).sigmoid_().add_(hc_eps)
        y[start : start + block] = _collapse(f, pre, h.dtype)
    return y


def hc_post_pre_norm(
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
    hc_eps: float,
    iters: int,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See interface.hc_post_pre_norm."""
    streams = hc_post(u, h, post, comb)
    return streams, *hc_pre(
        streams,
        fn,
        base,
        scale,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        iters=iters,
        norm_weight=norm_weight,
        codes=codes,
        code_scales=code_scales,
    )
