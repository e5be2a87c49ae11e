"""Routers, SwiGLU and plain experts for few tokens on a CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from anymla.ops._numba_rows import (
    CACHE,
    KERNEL,
    f32_at,
    from_bf16,
    gemv_bf16,
    gemv_f32,
    i32_at,
    i64_at,
    to_bf16,
    u8_at,
    u16_at,
    widen,
)
from anymla.ops.moe.reference import SUM_FLOOR


def route_hash(x, gate, token_ids, tid2eid, *, scale):
    """Backend of ``interface.route_hash`` in numba; see its contract."""
    (tokens, width), (vocabulary, k) = x.shape, tid2eid.shape
    x, gate, token_ids = x.contiguous(), gate.contiguous(), token_ids.contiguous()
    tid2eid = tid2eid.contiguous()
    ids, weights = _routed(tokens, k)
    _hash(
        (x.data_ptr(), gate.data_ptr(), token_ids.data_ptr(), tid2eid.data_ptr()),
        (tokens, len(gate), width, vocabulary, k), scale, ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights


def route_biased(x, gate, bias, *, k, scale, is_valid=None):
    """Backend of ``interface.route_biased`` in numba; see its contract."""
    tokens, width = x.shape
    x, gate, bias = x.contiguous(), gate.contiguous(), bias.contiguous()
    ids, weights = _routed(tokens, k)
    if is_valid is not None:
        is_valid = is_valid.contiguous()
    valid = 0 if is_valid is None else is_valid.data_ptr()
    _biased(
        (x.data_ptr(), gate.data_ptr(), bias.data_ptr(), valid),
        (tokens, len(gate), width, k), scale, ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights


def _routed(tokens, k):
    return torch.empty((tokens, k), dtype=torch.int32), torch.empty((tokens, k))


@njit(cache=CACHE)
def _score(product):
    """Return sqrt(softplus(product)); above 20, softplus is the identity as in torch."""
    x = np.float64(product)
    return np.float32(math.sqrt(np.float32(x if x > 20 else math.log1p(math.exp(x)))))


@njit(cache=CACHE, error_model="numpy")
def _weigh(scores, ids, scale, weights):
    total = np.float32(0)
    for i in range(len(ids)):
        weights[i] = scores[ids[i]]
        total += weights[i]
    total += np.float32(SUM_FLOOR)
    for i in range(len(ids)):
        weights[i] = weights[i] / total * np.float32(scale)


@njit(**KERNEL)
def _hash(places, sizes, scale, ids_at, weights_at):
    x, gate, token_ids, tid2eid = places
    tokens, experts, width, vocabulary, k = sizes
    wide, scores = np.empty(width, np.float32), np.empty(experts, np.float32)
    known, one = i64_at(token_ids, tokens), np.empty(1, np.float32)
    for token in range(tokens):
        ids, weights = i32_at(ids_at + 4 * token * k, k), f32_at(weights_at + 4 * token * k, k)
        if not 0 <= known[token] < vocabulary:
            ids[:] = -1
            weights[:] = 0
            continue
        widen(u16_at(x + 2 * token * width, width), wide)
        listed = i64_at(tid2eid + 8 * known[token] * k, k)
        for i in range(k):
            if not 0 <= listed[i] < experts:
                raise IndexError("tid2eid names an expert that gate has no row of")
            ids[i] = listed[i]
            gemv_f32(gate + 4 * listed[i] * width, 1, wide, one)
            scores[listed[i]] = _score(one[0])
        _weigh(scores, ids, scale, weights)


@njit(**KERNEL)
def _biased(places, sizes, scale, ids_at, weights_at):
    x, gate, bias, is_valid = places
    tokens, experts, width, k = sizes
    wide, scores = np.empty(width, np.float32), np.empty(experts, np.float32)
    ranked, offsets = np.empty(experts, np.float32), f32_at(bias, experts)
    for token in range(tokens):
        ids, weights = i32_at(ids_at + 4 * token * k, k), f32_at(weights_at + 4 * token * k, k)
        if is_valid != 0 and not u8_at(is_valid, tokens)[token]:
            ids[:] = -1
            weights[:] = 0
            continue
        widen(u16_at(x + 2 * token * width, width), wide)
        gemv_f32(gate, experts, wide, scores)
        for e in range(experts):
            scores[e] = _score(scores[e])
            ranked[e] = scores[e] + offsets[e]
            if ranked[e] != ranked[e]:
                ranked[e] = np.inf  # torch sorts NaN first
        for i in range(k):
            best = -1
            for e in range(experts):
                free = True
                for before in range(i):
                    free &= ids[before] != e
                if free and (best < 0 or ranked[e] > ranked[best]):
                    best = e
            ids[i] = best
        _weigh(scores, ids, scale, weights)


def swiglu(gate, up, limit, *, codes=None, code_scales=None):
    """Backend of ``interface.swiglu`` in numba; see its contract."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    gate, up = gate.contiguous(), up.contiguous()
    _swiglu_of(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), limit)
    return out


@njit(cache=CACHE, error_model="numpy")
def _activated(gate, up, limit):
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)``; a NaN stays a NaN."""
    gate = limit if gate > limit else gate
    up = limit if up > limit else -limit if up < -limit else up
    return gate / (np.float32(1) + np.float32(math.exp(-gate))) * up


@njit(**KERNEL)
def _swiglu_of(gate, up, out, count, limit):
    gates, ups, to = u16_at(gate, count), u16_at(up, count), u16_at(out, count)
    bound = np.float32(limit)
    for i in range(count):
        to[i] = to_bf16(_activated(from_bf16(gates[i]), from_bf16(ups[i]), bound))


def plain_experts(x, ids, weights, w1, w3, w2, limit, offset, shared):
    """Compute ``interface.experts`` for bfloat16 weights."""
    tokens, width = x.shape
    x, weights = x.contiguous(), weights.contiguous()
    inner = w1[0].shape[0]
    firsts = [(each[0].shape, each[0].dtype) for each in (w1, w3, w2)]
    out = torch.empty(x.shape, dtype=x.dtype)
    if shared is not None:
        shared = shared.contiguous()
    chosen, held = [], []
    for row in ids.tolist():
        for e in row:
            if 0 <= e - offset < len(w1):
                three = [each[e - offset].contiguous() for each in (w1, w3, w2)]
                # The contract examines the first tensor of a list; the kernel reads all by their
                # addresses.
                if [(each.shape, each.dtype) for each in three] != firsts:
                    raise ValueError(f"experts: expert {e} is not of the first one's sizes")
                held.append(three)
                chosen += [each.data_ptr() for each in three]
            else:
                chosen += (0, 0, 0)
    _experts(
        (x.data_ptr(), weights.data_ptr(), 0 if shared is None else shared.data_ptr()),
        (tokens, ids.shape[1], width, inner), np.array(chosen, np.int64), limit, out.data_ptr(),
    )  # fmt: skip
    return out


@njit(**KERNEL)
def _experts(places, sizes, chosen, limit, out):
    x, factors_at, shared = places
    tokens, k, width, inner = sizes
    bound = np.float32(limit)
    wide, total = np.empty(width, np.float32), np.empty(width, np.float32)
    gate, up = np.empty(inner, np.float32), np.empty(inner, np.float32)
    down = np.empty(width, np.float32)
    for token in range(tokens):
        widen(u16_at(x + 2 * token * width, width), wide)
        total[:] = 0
        factors = f32_at(factors_at + 4 * token * k, k)
        for i in range(k):
            place = 3 * (token * k + i)
            if chosen[place] == 0:
                continue
            gemv_bf16(chosen[place], inner, wide, gate)
            gemv_bf16(chosen[place + 1], inner, wide, up)
            for each in range(inner):
                # Products and w2's input are rounded as separate operations would round them.
                g, u = from_bf16(to_bf16(gate[each])), from_bf16(to_bf16(up[each]))
                gate[each] = from_bf16(to_bf16(_activated(g, u, bound) * factors[i]))
            gemv_bf16(chosen[place + 2], width, gate, down)
            for each in range(width):
                total[each] += from_bf16(to_bf16(down[each]))
        if shared != 0:
            more = u16_at(shared + 2 * token * width, width)
            for each in range(width):
                total[each] += from_bf16(more[each])
        to = u16_at(out + 2 * token * width, width)
        for each in range(width):
            to[each] = to_bf16(total[each])
