"""Storing of the compressor's states for few tokens on a CPU."""

from __future__ import annotations

from numba import njit

from anymla.ops._numba_rows import KERNEL, f32_at, i64_at


def save_partial_states(kv, score, ape, positions, state_cache, slot_mapping, *, compress_ratio):
    """Backend of ``interface.save_partial_states`` in numba; see its contract."""
    if kv.stride(1) != 1 or score.stride(1) != 1:
        kv, score = kv.contiguous(), score.contiguous()
    slots, positions, ape = slot_mapping.contiguous(), positions.contiguous(), ape.contiguous()
    _save(
        (kv.data_ptr(), kv.stride(0), score.data_ptr(), score.stride(0)),
        (len(slots), kv.shape[1], compress_ratio),
        (ape.data_ptr(), positions.data_ptr(), slots.data_ptr()),
        (state_cache.data_ptr(), *state_cache.shape[:2], state_cache.stride(0)),
    )


@njit(**KERNEL)
def _save(rows, sizes, places, cache):
    kv, kv_stride, score, score_stride = rows
    count, width, ratio = sizes
    ape, positions, slots = places
    start, pages, entries, stride = cache
    at, targets = i64_at(positions, count), i64_at(slots, count)
    for token in range(count):
        slot = targets[token]
        if not 0 <= slot < pages * entries:
            continue
        values = f32_at(kv + 4 * token * kv_stride, width)
        logits = f32_at(score + 4 * token * score_stride, width)
        bias = f32_at(ape + 4 * width * (at[token] % ratio), width)
        place = start + 4 * (slot // entries * stride + slot % entries * 2 * width)
        state = f32_at(place, 2 * width)
        for i in range(width):
            state[i] = values[i]
            state[width + i] = logits[i] + bias[i]
