"""Norms, and a step's queries and cache rows, for few tokens on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.torch_rows import fp8_tables
from anymla.ops._numba_rows import (
    KERNEL,
    bits_of,
    f32_at,
    from_bf16,
    i64_at,
    inverse_rms,
    narrow,
    rope_row,
    table_row,
    to_bf16,
    u8_at,
    u16_at,
    widen,
)
from anymla.ops._torch_norm_rope import freqs_cis, rotate_
from anymla.ops._torch_pages import write_rows


def rms_norm(x, weight, eps):
    """Backend of ``interface.rms_norm`` in numba; see its contract."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    x, weight = x.contiguous(), weight.contiguous()
    _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    return out


def fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps, *, codes=None, code_scales=None):
    """Backend of ``interface.fused_q_kv_rmsnorm`` in numba; see its contract."""
    q_out, kv_out = torch.empty(qr.shape, dtype=qr.dtype), torch.empty(kv.shape, dtype=kv.dtype)
    qr, kv, q_weight, kv_weight = (
        qr.contiguous(), kv.contiguous(), q_weight.contiguous(), kv_weight.contiguous()
    )  # fmt: skip
    _norms(
        (qr.data_ptr(), q_weight.data_ptr(), q_out.data_ptr(), qr.shape[1]),
        (kv.data_ptr(), kv_weight.data_ptr(), kv_out.data_ptr(), kv.shape[1]),
        len(qr), eps,
    )  # fmt: skip
    return q_out, kv_out


@njit(**KERNEL)
def _norm(x, weight, out, rows, width, eps):
    wide, factors = np.empty(width, np.float32), f32_at(weight, width)
    for row in range(rows):
        widen(u16_at(x + 2 * row * width, width), wide)
        inverse = inverse_rms(wide, eps)
        to = u16_at(out + 2 * row * width, width)
        for i in range(width):
            to[i] = to_bf16(wide[i] * inverse * factors[i])


@njit(**KERNEL)
def _norms(first, second, rows, eps):
    _norm(first[0], first[1], first[2], rows, first[3], eps)
    _norm(second[0], second[1], second[2], rows, second[3], eps)


def qnorm_rope_kv_insert(
    q, kv, k_cache, slot_mapping, positions, cos_sin_cache, eps, *, layout=MAIN_FP8, out=None
):
    """Backend of ``interface.qnorm_rope_kv_insert`` in numba; see its contract."""
    tokens, heads, width = q.shape
    q, positions, table = q.contiguous(), positions.contiguous(), cos_sin_cache.contiguous()
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty(q.shape, dtype=q.dtype)
    kv, slots = kv.contiguous(), slot_mapping.contiguous()
    cache, rows, tables = pages_of(k_cache), get_layout(layout), fp8_tables()
    left = _queries_and_rows(
        (q.data_ptr(), kv.data_ptr(), out.data_ptr(), slots.data_ptr(), positions.data_ptr()),
        (tokens, len(slots), heads, width), eps,
        (table.data_ptr(), *table.shape),
        (cache.data_ptr(), cache.shape[0], cache.shape[1], cache.stride(0)),
        (rows.nope, rows.block, rows.data_bytes, rows.scale_bytes),
        tables[0], tables[2], tables[3],
    )  # fmt: skip
    if left:  # some row holds an infinity or a NaN
        wide = kv[: len(slots)].float()
        rotate_(wide, freqs_cis(positions[: len(slots)], cos_sin_cache, torch.float32))
        write_rows(k_cache, slots, wide, layout)
    return out if given is None or given is out else given.copy_(out)


@njit(**KERNEL)
def _queries_and_rows(places, sizes, eps, table, cache, layout, scales, inverses, codes):
    """Write queries and cache rows; return the rows left out because of an infinity or a NaN."""
    q, kv, out, slots, positions = places
    tokens, inserted, heads, width = sizes
    first, table_rows, rope = table
    pages, entries = cache[1], cache[2]
    at, targets = i64_at(positions, tokens), i64_at(slots, inserted)
    wide = np.empty(width, np.float32)
    left = 0
    for token in range(tokens):
        row = table_row(first, table_rows, rope, at[token])
        for head in range(heads):
            offset = 2 * (token * heads + head) * width
            widen(u16_at(q + offset, width), wide)
            wide *= inverse_rms(wide, eps)
            rope_row(wide, row, rope // 2, 1)
            narrow(wide, u16_at(out + offset, width))
        if token < inserted and 0 <= targets[token] < pages * entries:
            widen(u16_at(kv + 2 * token * width, width), wide)
            rope_row(wide, row, rope // 2, 1)
            if not _write_row(wide, targets[token], cache, layout, scales, inverses, codes):
                left += 1
    return left


@njit(**KERNEL)
def _write_row(row, slot, cache, layout, scales, inverses, codes):
    """Encode a row as ``formats.torch_rows.write_row`` does; return False if it is left out."""
    start, _, entries, stride = cache
    nope, block, data_bytes, scale_bytes = layout
    page = start + slot // entries * stride
    data = u8_at(page + slot % entries * data_bytes, data_bytes)
    exponents = u8_at(page + entries * data_bytes + slot % entries * scale_bytes, scale_bytes)
    bits = np.empty(len(row), np.uint16)
    narrow(row, bits)
    for i in range(nope):
        if (bits[i] & np.uint16(0x7FFF)) >= np.uint16(0x7F80):
            return False
    for number in range(nope // block):
        some = bits[number * block : (number + 1) * block]
        peak = np.uint16(0)
        for i in range(block):
            peak = max(peak, some[i] & np.uint16(0x7FFF))
        inverse = inverses[peak]
        for i in range(block):
            scaled = bits_of(from_bf16(some[i]) * inverse)
            data[number * block + i] = codes[scaled >> np.uint32(16)]
        exponents[number] = scales[peak]
    for i in range(nope // block, scale_bytes):
        exponents[i] = 0
    rest = u16_at(page + slot % entries * data_bytes + nope, len(row) - nope)
    for i in range(len(row) - nope):
        rest[i] = bits[nope + i]
    return True
