"""What takes the time in training, each as one pass over memory: streams, rotation, SwiGLU.

Every function has a plain form in torch, which runs on a CPU, and Triton kernels for the forward
and the backward pass on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 4


def fused(x: Tensor) -> bool:
    """Whether the kernels run."""
    return x.is_cuda


@triton.jit
def _collapse(h_ptr, pre_ptr, y_ptr, D: tl.constexpr, N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    y = tl.zeros([D], tl.float32)
    for i in tl.static_range(N):
        y += tl.load(pre_ptr + t * N + i) * tl.load(h_ptr + (t * N + i) * D + d).to(tl.float32)
    tl.store(y_ptr + t * D + d, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _collapse_grad(h_ptr, pre_ptr, g_ptr, dh_ptr, dpre_ptr, D: tl.constexpr, N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    g = tl.load(g_ptr + t * D + d).to(tl.float32)
    for i in tl.static_range(N):
        at = (t * N + i) * D + d
        h = tl.load(h_ptr + at).to(tl.float32)
        tl.store(dh_ptr + at, (tl.load(pre_ptr + t * N + i) * g).to(dh_ptr.dtype.element_ty))
        tl.store(dpre_ptr + t * N + i, tl.sum(h * g))


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, pre: Tensor) -> Tensor:
        h, pre = h.contiguous(), pre.float().contiguous()
        ctx.save_for_backward(h, pre)
        n, d = h.shape[-2:]
        y = h.new_empty(*h.shape[:-2], d)
        _collapse[(h.numel() // (n * d),)](h, pre, y, D=d, N=n, num_warps=2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        h, pre = ctx.saved_tensors
        n, d = h.shape[-2:]
        dh, dpre = torch.empty_like(h), torch.empty_like(pre)
        grid = (h.numel() // (n * d),)
        _collapse_grad[grid](h, pre, g.contiguous(), dh, dpre, D=d, N=n, num_warps=2)
        return dh, dpre


def collapse(h: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i h_i: [B, T, N, D], float32 [B, T, N] -> [B, T, D]."""
    if fused(h):
        out: Tensor = _Collapse.apply(h, pre)
        return out
    return torch.einsum("btn,btnd->btd", pre.to(h.dtype), h)


@triton.jit
def _expand(h_ptr, u_ptr, post_ptr, comb_ptr, o_ptr, D: tl.constexpr, N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    u = tl.load(u_ptr + t * D + d).to(tl.float32)
    for j in tl.static_range(N):
        o = tl.load(post_ptr + t * N + j) * u
        for i in tl.static_range(N):
            h = tl.load(h_ptr + (t * N + i) * D + d).to(tl.float32)
            o += tl.load(comb_ptr + (t * N + i) * N + j) * h
        tl.store(o_ptr + (t * N + j) * D + d, o.to(o_ptr.dtype.element_ty))


@triton.jit
def _expand_grad(
    h_ptr, u_ptr, post_ptr, comb_ptr, g_ptr, dh_ptr, du_ptr, dpost_ptr, dcomb_ptr,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    u = tl.load(u_ptr + t * D + d).to(tl.float32)
    du = tl.zeros([D], tl.float32)
    for j in tl.static_range(N):
        g = tl.load(g_ptr + (t * N + j) * D + d).to(tl.float32)
        du += tl.load(post_ptr + t * N + j) * g
        tl.store(dpost_ptr + t * N + j, tl.sum(u * g))
    tl.store(du_ptr + t * D + d, du.to(du_ptr.dtype.element_ty))
    for i in tl.static_range(N):
        h = tl.load(h_ptr + (t * N + i) * D + d).to(tl.float32)
        dh = tl.zeros([D], tl.float32)
        for j in tl.static_range(N):
            g = tl.load(g_ptr + (t * N + j) * D + d).to(tl.float32)
            at = (t * N + i) * N + j
            dh += tl.load(comb_ptr + at) * g
            tl.store(dcomb_ptr + at, tl.sum(h * g))
        tl.store(dh_ptr + (t * N + i) * D + d, dh.to(dh_ptr.dtype.element_ty))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, u: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        h, u = h.contiguous(), u.contiguous()
        post, comb = post.float().contiguous(), comb.float().contiguous()
        ctx.save_for_backward(h, u, post, comb)
        n, d = h.shape[-2:]
        out = torch.empty_like(h)
        _expand[(h.numel() // (n * d),)](h, u, post, comb, out, D=d, N=n, num_warps=2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, u, post, comb = ctx.saved_tensors
        n, d = h.shape[-2:]
        out = tuple(map(torch.empty_like, (h, u, post, comb)))
        grid = (h.numel() // (n * d),)
        _expand_grad[grid](h, u, post, comb, g.contiguous(), *out, D=d, N=n, num_warps=2)
        return out  # type: ignore[return-value]


def expand(h: Tensor, u: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_j u + sum_i comb_ij h_i: the streams [B, T, N, D] behind a sub-layer's output u."""
    if fused(h):
        out: Tensor = _Expand.apply(h, u, post, comb)
        return out
    mixed = torch.einsum("btij,btid->btjd", comb.to(h.dtype), h)
    return mixed + post.to(h.dtype).unsqueeze(-1) * u.unsqueeze(2)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, o_ptr, rows, heads, sign,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = r < rows
    t = r // heads
    d = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + r * D + d, mask=inside & (d < REST), other=0.0)
    tl.store(o_ptr + r * D + d, x, mask=inside & (d < REST))
    p = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + t * HALF + p, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + t * HALF + p, mask=inside, other=0.0) * sign
    even = tl.load(x_ptr + r * D + REST + 2 * p, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + r * D + REST + 2 * p + 1, mask=inside, other=0.0).to(tl.float32)
    kind = o_ptr.dtype.element_ty
    tl.store(o_ptr + r * D + REST + 2 * p, (even * cos - odd * sin).to(kind), mask=inside)
    tl.store(o_ptr + r * D + REST + 2 * p + 1, (odd * cos + even * sin).to(kind), mask=inside)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return _rotated(x, cos, sin, sign)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotated(g, *ctx.saved_tensors, -ctx.sign), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    d, half = x.shape[-1], cos.shape[-1]
    rows = x.numel() // d
    heads = rows // (cos.numel() // half)
    grid = (triton.cdiv(rows, ROWS),)
    _rotate[grid](
        x, cos, sin, out, rows, heads, sign, D=d, HALF=half, REST=d - 2 * half, BLOCK=ROWS
    )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last channels of x [B, T, ..., D]; cos, sin [B, T, pairs]."""
    if fused(x):
        out: Tensor = _Rotate.apply(x, cos, sin, -1.0 if inverse else 1.0)
        return out
    sin = -sin if inverse else sin
    if x.ndim == 4:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    dim = 2 * cos.shape[-1]
    rest, turned = x[..., :-dim], x[..., -dim:].float().unflatten(-1, (-1, 2))
    even, odd = turned[..., 0], turned[..., 1]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((rest, pairs.to(x.dtype)), -1)


@triton.jit
def _swiglu(g_ptr, u_ptr, s_ptr, o_ptr, limit, E: tl.constexpr, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * E
    e, c = tl.arange(0, E)[:, None], tl.arange(0, W)[None, :]
    place = (at + e) * W + c
    g = tl.minimum(tl.load(g_ptr + place).to(tl.float32), limit)
    u = tl.load(u_ptr + place).to(tl.float32)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    s = tl.load(s_ptr + at + e)
    tl.store(o_ptr + place, (g * tl.sigmoid(g) * u * s).to(o_ptr.dtype.element_ty))


@triton.jit
def _swiglu_grad(
    g_ptr, u_ptr, s_ptr, d_ptr, dg_ptr, du_ptr, ds_ptr, limit, E: tl.constexpr, W: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * E
    e, c = tl.arange(0, E)[:, None], tl.arange(0, W)[None, :]
    place = (at + e) * W + c
    gate, up = tl.load(g_ptr + place).to(tl.float32), tl.load(u_ptr + place).to(tl.float32)
    g, u = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    s, d = tl.load(s_ptr + at + e), tl.load(d_ptr + place).to(tl.float32)
    sig = tl.sigmoid(g)
    tl.store(ds_ptr + at + e, tl.sum(d * g * sig * u, 1)[:, None])
    kind = dg_ptr.dtype.element_ty
    dg = tl.where(gate < limit, d * s * u * sig * (1 + g * (1 - sig)), 0.0)
    tl.store(dg_ptr + place, dg.to(kind))
    du = tl.where((up > -limit) & (up < limit), d * s * g * sig, 0.0)
    tl.store(du_ptr + place, du.to(kind))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor, limit: float) -> Tensor:
        gate, up, share = gate.contiguous(), up.contiguous(), share.float().contiguous()
        ctx.save_for_backward(gate, up, share)
        ctx.limit = limit
        out = torch.empty_like(gate)
        e = share.shape[-1]
        _swiglu[(share.numel() // e,)](gate, up, share, out, limit, E=e, W=gate.shape[-1] // e)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, share = ctx.saved_tensors
        out = tuple(map(torch.empty_like, (gate, up, share)))
        e = share.shape[-1]
        grid = (share.numel() // e,)
        _swiglu_grad[grid](
            gate, up, share, d.contiguous(), *out, ctx.limit, E=e, W=gate.shape[-1] // e
        )
        return (*out, None)  # type: ignore[return-value]


def swiglu(gate: Tensor, up: Tensor, share: Tensor, limit: float) -> Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L) * share of its expert.

    Args:
        gate: [B, T, experts * width].
        up: the same.
        share: float32 [B, T, experts].
        limit: L.
    """
    if fused(gate):
        out: Tensor = _Swiglu.apply(gate, up, share, limit)
        return out
    inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    parts = inner.unflatten(-1, (share.shape[-1], -1))
    return (parts * share.to(inner.dtype).unsqueeze(-1)).flatten(-2)


@triton.jit
def _softmax(
    w_ptr, e_ptr, at_ptr, keep_ptr, sink_ptr, pw_ptr, pe_ptr, length, entries, ratio, scale,
    H: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, E: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row, t = r // H, (r // H) % length
    j, e = tl.arange(0, 2 * S), tl.arange(0, E)
    key = (t // S) * S - S + j
    here = tl.load(at_ptr + row)
    distance = here - tl.load(at_ptr + row - t + key, mask=key >= 0, other=0)
    near = (key >= 0) & (distance >= 0) & (distance < WINDOW)
    w = tl.load(w_ptr + r * 2 * S + j).to(tl.float32) * scale
    w = tl.where(near, w, float("-inf"))
    sink = tl.load(sink_ptr + r % H)
    most = tl.maximum(tl.max(w), sink)
    if ratio > 0:
        seen = e < tl.minimum((t + 1) // ratio, entries)
        if KEEP:
            seen = seen & (tl.load(keep_ptr + row * entries + e, mask=e < entries, other=0) != 0)
        s = tl.load(e_ptr + r * entries + e, mask=seen, other=0.0).to(tl.float32) * scale
        s = tl.where(seen, s, float("-inf"))
        most = tl.maximum(most, tl.max(s))
        total = tl.sum(tl.exp(w - most)) + tl.exp(sink - most) + tl.sum(tl.exp(s - most))
        p = (tl.exp(s - most) / total).to(pe_ptr.dtype.element_ty)
        tl.store(pe_ptr + r * entries + e, p, mask=e < entries)
    else:
        total = tl.sum(tl.exp(w - most)) + tl.exp(sink - most)
    tl.store(pw_ptr + r * 2 * S + j, (tl.exp(w - most) / total).to(pw_ptr.dtype.element_ty))


@triton.jit
def _softmax_grad(
    pw_ptr, pe_ptr, gw_ptr, ge_ptr, dw_ptr, de_ptr, dsink_ptr, entries, ratio, scale,
    S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    j, e = tl.arange(0, 2 * S), tl.arange(0, E)
    pw = tl.load(pw_ptr + r * 2 * S + j).to(tl.float32)
    gw = tl.load(gw_ptr + r * 2 * S + j).to(tl.float32)
    mean, mass = tl.sum(pw * gw), tl.sum(pw)
    if ratio > 0:
        pe = tl.load(pe_ptr + r * entries + e, mask=e < entries, other=0.0).to(tl.float32)
        ge = tl.load(ge_ptr + r * entries + e, mask=e < entries, other=0.0).to(tl.float32)
        mean += tl.sum(pe * ge)
        mass += tl.sum(pe)
        de = (pe * (ge - mean) * scale).to(de_ptr.dtype.element_ty)
        tl.store(de_ptr + r * entries + e, de, mask=e < entries)
    tl.store(dw_ptr + r * 2 * S + j, (pw * (gw - mean) * scale).to(dw_ptr.dtype.element_ty))
    # The sink's share is what is left.
    tl.store(dsink_ptr + r, -(1 - mass) * mean)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, window: Tensor, entries: Tensor | None, sink: Tensor, positions: Tensor,
        keep: Tensor | None, ratio: int, size: int, reach: int, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        window = window.contiguous()
        far = window.new_empty(0) if entries is None else entries.contiguous()
        count = 0 if entries is None else far.shape[-1]
        ctx.sizes = (
            count,
            ratio if count else 0,
            scale,
            size,
            triton.next_power_of_2(max(count, 16)),
        )
        pw, pe = torch.empty_like(window), torch.empty_like(far)
        heads = window.shape[2]
        _softmax[(window.numel() // (2 * size),)](
            window, far, positions.contiguous(), window if keep is None else keep.contiguous(),
            sink, pw, pe, window.shape[1], count, ctx.sizes[1], scale,
            H=heads, S=size, WINDOW=reach, E=ctx.sizes[4], KEEP=keep is not None,
        )  # fmt: skip
        ctx.save_for_backward(pw, pe)
        return pw, pe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gw: Tensor, ge: Tensor) -> tuple[Any, ...]:
        pw, pe = ctx.saved_tensors
        count, ratio, scale, size, padded = ctx.sizes
        dw, de = torch.empty_like(pw), torch.empty_like(pe)
        dsink = torch.empty(pw.shape[:3], dtype=torch.float32, device=pw.device)
        _softmax_grad[(dsink.numel(),)](
            pw, pe, gw.contiguous(), ge.contiguous(), dw, de, dsink, count, ratio, scale,
            S=size, E=padded,
        )  # fmt: skip
        return dw, de if count else None, dsink.sum((0, 1)), *[None] * 6


def attention_weights(
    window: Tensor,
    entries: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    *,
    keep: Tensor | None,
    ratio: int,
    size: int,
    reach: int,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over a window, compressed entries and a sink.

    Args:
        window: [B, T, H, 2 size], products with the keys of a query's block and the one before it.
        entries: [B, T, H, E], products with the entries, or None.
        sink: float32 [H].
        positions: [B, T].
        keep: bool [B, T, E], entries that may be attended to; None for all.
        ratio: entry e is there from token ratio * (e + 1) - 1 on.
        size: tokens of a block.
        reach: of the window, in positions.
        scale: of the products.

    Returns:
        The weights of window and entries, of their dtype.
    """
    if fused(window):
        pw, pe = _Softmax.apply(window, entries, sink, positions, keep, ratio, size, reach, scale)
        return pw, None if entries is None else pe
    length = window.shape[1]
    t = torch.arange(length, device=window.device).unsqueeze(1)
    key = t // size * size - size + torch.arange(2 * size, device=window.device)
    distance = positions.unsqueeze(-1) - positions[:, key.clamp(min=0)]
    near = (key >= 0) & (distance >= 0) & (distance < reach)
    parts = [(window.float() * scale).masked_fill(~near.unsqueeze(2), -torch.inf)]
    parts.append(sink.view(1, 1, -1, 1).expand(*window.shape[:3], 1))
    if entries is not None:
        seen = torch.arange(entries.shape[-1], device=window.device) < (t + 1) // ratio
        seen = seen.unsqueeze(0) if keep is None else seen & keep
        parts.append((entries.float() * scale).masked_fill(~seen.unsqueeze(2), -torch.inf))
    p = torch.cat(parts, -1).softmax(-1).to(window.dtype)
    width = 2 * size
    return p[..., :width], None if entries is None else p[..., width + 1 :]
