"""Exact top-k of rows in Triton: radix select by histograms, then the winners in order.

Scores are mapped to integers of the same order. A CTA finds the k-th largest integer of its split
of a row digit by digit, from histograms of 256 bins, and keeps the top-k in the order of their
columns. A few long rows have several splits, whose winners go through another selection. Winners
are sorted last. Nothing depends on the order in which CTAs run.

    select   row | split | split | ..  ->  k candidates a split     grid (rows, splits)
    merge    candidates of a row       ->  k winners                grid (rows,)
    sort     winners of a row, in a sorting network  ->  k columns  grid (rows,)
    rank     each goes to the number of better ones  ->  k columns  grid (rows, blocks of winners)

Workspace: int32 candidates [rows, splits * k] and winners [rows, k].

For values that a CTA holds in registers, the k-th largest is found by counting (``kth_largest``,
which ``triton_select`` uses). The numbers of keys that reach two probes at a time narrow (low,
high] until the count is k or one key is left. The choice of probes decides how long that takes, but
never the result:

    first    around the quantile of a normal distribution with the keys' mean and deviation
    then     around the key where the logarithm of the count, interpolated, is that of k
    fifth    at thirds of the range, which bounds the search for any scores
"""

from __future__ import annotations

import inspect

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import target_of
from anymla.ops.indexer.config import (
    choose_topk_config,
    rank_warps,
    sort_warps,
    topk_warps,
)
from anymla.ops.streams import scratch

# A score becomes an int32 "key" that orders as scores do: -0 equals 0, every NaN is the largest. No
# key equals NOTHING, which marks an absent entry.
NAN_KEY = tl.constexpr(0x7F800001)  # just above +inf's bits
NOTHING = tl.constexpr(-0x80000000)
_LARGEST = tl.constexpr(0x7FFFFFFF)
# True since Triton 3.4.
_MASKED_HISTOGRAM = tl.constexpr("mask" in inspect.signature(tl.histogram).parameters)
# Number of winners that a CTA ranks, and number of winners with which it compares them at once.
_RANKED, _COMPARED = 32, 256


@triton.jit
def ordered(bits):
    """Map float32 scores, given as their bits, to keys."""
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(magnitude > 0x7F800000, NAN_KEY, key)


@triton.jit
def ordered_result(x, CANONICAL: tl.constexpr):
    """Map float32 results to keys; CANONICAL if arithmetic makes no NaN but the one of all ones."""
    if CANONICAL:
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        return tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)
    else:
        return ordered(x.to(tl.int32, bitcast=True))


@triton.jit
def _as_float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _as_key(x):
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _log2(count):
    """Approximate log2 by the bits of a float32; for 0 return that of a half."""
    x = tl.maximum(count.to(tl.float32), 0.5)
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608)


@triton.jit
def _normal_quantile(count, wanted):
    """Approximate how many deviations above the mean ``wanted`` of ``count`` normal values exceed.

    Source: Abramowitz and Stegun, 26.2.23.
    """
    r = tl.sqrt(1.3862944 * (_log2(count) - _log2(wanted)))
    above = 2.515517 + r * (0.802853 + r * 0.010328)
    return r - above / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308)))


@triton.jit
def _probes(low, high, count_low, count_high, wanted, step, guess, margin):
    """Choose two keys in (low, high] to count at, in ascending order."""
    top, bottom = _log2(count_low), _log2(count_high)
    first, last = _as_float(low), _as_float(high)
    middle = first + (last - first) * ((top - _log2(wanted)) / (top - bottom))
    # The interpolated share errs by about the square root of the number of keys between.
    spread = (last - first) * 0.25 / tl.sqrt((count_low - count_high).to(tl.float32))
    middle = tl.where(step == 0, guess, middle)
    spread = tl.where(step == 0, margin, spread)
    lower, upper = _as_key(middle - spread), _as_key(middle + spread)
    if step % 5 == 4:
        # A quarter of the difference cannot overflow.
        third = ((high >> 2) - (low >> 2)) // 3 * 4
        lower, upper = low + third, high - third
    lower = tl.minimum(tl.maximum(lower, low + 1), high)
    return lower, tl.minimum(tl.maximum(upper, lower), high)


@triton.jit
def narrow(key, count, wanted, slack, NORMAL: tl.constexpr):
    """Narrow the range of the ``wanted``-th largest key; return (low, reach, above).

    ``reach`` keys are >= low. Either ``reach`` is at least ``wanted`` and at most ``slack`` more,
    or low is the ``wanted``-th largest key and ``above`` the number of larger ones.

    Args:
        key: int32 of any shape, at most 32,767 elements, NOTHING where there is none.
        count: number of keys that exist, at least ``wanted``.
        wanted: rank of the key to find, at least 1.
        slack: surplus of keys that is accepted, at least 0.
        NORMAL: True to look first where normally distributed scores would have the key.
    """
    there = key != NOTHING
    high = tl.max(key)
    low = tl.min(tl.where(there, key, _LARGEST))
    guess, margin, step = _as_float(low), 0.0, 1
    if NORMAL:
        x = tl.where(there, _as_float(key), 0.0)
        number = count.to(tl.float32)
        mean = tl.sum(x) / number
        deviation = tl.sqrt(tl.maximum(tl.sum(x * x) / number - mean * mean, 0.0))
        guess = mean + deviation * _normal_quantile(count, wanted)
        margin, step = deviation * 0.075, 0
    # Invariant: reach = count(>= low) >= wanted > above = count(> high).
    reach, above = count, tl.zeros_like(count)
    while (low < high) & (reach > wanted + slack):
        lower, upper = _probes(low, high, reach, above, wanted, step, guess, margin)
        counts = tl.sum((key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16))
        more, less = counts & 0xFFFF, counts >> 16
        if less >= wanted:
            low = upper
            reach = less
        else:
            high = upper - 1
            above = less
            if more >= wanted:
                low = lower
                reach = more
            else:
                high = lower - 1
                above = more
        step += 1
    return low, reach, above


@triton.jit
def kth_largest(key, count, wanted, NORMAL: tl.constexpr):
    """Find (limit, above): the best keys are ``above`` that are > limit and others == limit.

    Of the latter ``wanted - above`` are taken. Arguments are those of ``narrow``.
    """
    low, reach, above = narrow(key, count, wanted, 0, NORMAL)
    whole = reach == wanted
    return tl.where(whole, low - 1, low), tl.where(whole, wanted, above)


@triton.jit
def places(key, limit, need):
    """Return the places of the chosen elements, in the order of elements, and which are chosen.

    Keys > limit are chosen, and the first ``need`` keys == limit.

    Args:
        key: [LINES, EACH] int32, fewer than 2^15, neighbours in a line.
        limit: smallest key that may be chosen, or NOTHING.
        need: number of keys == limit that are chosen.
    """
    beyond = key > limit
    same = (key == limit) & (key != NOTHING)
    # Scan two counts packed into one int32.
    pair = beyond.to(tl.int32) + (same.to(tl.int32) << 16)
    line = tl.sum(pair, 1)
    running = (tl.cumsum(line, 0) - line)[:, None] + tl.cumsum(pair, 1)
    equal = running >> 16
    place = (running & 0xFFFF) + tl.minimum(equal, need) - 1
    return place, beyond | (same & (equal <= need))


@triton.jit
def _visible_columns(starts, ends, row, columns):
    """Return the first visible column and the number of visible columns of a row."""
    first = tl.maximum(tl.load(starts + row), 0)
    length = tl.maximum(tl.minimum(tl.load(ends + row), columns).to(tl.int64) - first, 0)
    return first, length.to(tl.int32)


@triton.jit
def _load(line, candidates, first, at, count, MERGE: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns, existence and unsigned keys of elements [at, at + BLOCK) of ``count``."""
    element = at + tl.arange(0, BLOCK)
    inside = element < count
    if MERGE:
        column = tl.load(candidates + element, mask=inside, other=-1)
        inside = column >= 0
    else:
        column = first + element
    key = ordered(tl.load(line + column, mask=inside, other=0))
    return column, inside, key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _digit_histogram(key, inside, prefix, shift):
    """Count the digits at ``shift`` of the keys that begin with ``prefix``."""
    begins = inside & (((key >> shift) >> 8) == prefix)
    digit = ((key >> shift) & 255).to(tl.int32)
    if _MASKED_HISTOGRAM:
        return tl.histogram(digit, 256, mask=begins)
    else:
        others = tl.sum((~begins).to(tl.int32), 0)
        counted = tl.histogram(tl.where(begins, digit, 0), 256)
        return counted - tl.where(tl.arange(0, 256) == 0, others, 0)


@triton.jit(do_not_specialize=["columns", "k", "kept", "splits"])
def select_kernel(
    logits,
    row_stride,
    starts,
    ends,
    candidates,
    out,
    columns,
    k,
    kept,
    splits,
    MERGE: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select the top-k of a split of a row, or of a row's candidates, as ascending columns.

    ``kept`` columns are written, -1 where there are fewer. With MERGE the elements are the ``splits
    * kept`` candidates of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first, length = _visible_columns(starts, ends, row, columns)
    line = logits + row * row_stride
    if MERGE:
        count = splits * kept
        candidates += row * count
        out += row * kept
        exist = length
    else:
        size = tl.cdiv(length, splits)
        first += split * size
        count = tl.minimum(tl.maximum(length - split * size, 0), size)
        out += (row * splits + split) * kept
        exist = count
    wanted = tl.minimum(k, exist)

    # The k-th largest key begins with ``prefix`` at ``shift``; of the keys that do, the first
    # ``need`` are taken, and all larger ones. Zeros take everything.
    prefix = tl.full((), 0, tl.uint32)
    shift = tl.full((), 0, tl.uint32)
    need = wanted
    left = tl.where(exist > k, 4, 0)
    if RESIDENT:
        column, inside, key = _load(line, candidates, first, 0, count, MERGE, BLOCK)
    bins = tl.arange(0, 256)
    while left > 0:
        shift = ((left - 1) * 8).to(tl.uint32)
        if RESIDENT:
            histogram = _digit_histogram(key, inside, prefix, shift)
        else:
            histogram = tl.zeros((256,), tl.int32)
            for at in range(0, count, BLOCK):
                column, inside, key = _load(line, candidates, first, at, count, MERGE, BLOCK)
                histogram += _digit_histogram(key, inside, prefix, shift)
        at_least = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
        digit = tl.max(tl.where(at_least >= need, bins, 0), 0)
        need -= tl.sum(tl.where(bins > digit, histogram, 0), 0)
        alike = tl.sum(tl.where(bins == digit, histogram, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
        left = tl.where(alike == need, 0, left - 1)

    above, equal = 0, 0
    for at in range(0, count, BLOCK):
        if not RESIDENT:
            column, inside, key = _load(line, candidates, first, at, count, MERGE, BLOCK)
        beyond = inside & ((key >> shift) > prefix)
        same = inside & ((key >> shift) == prefix)
        # Scan two counts packed into one int32: a block has fewer than 2^15 elements.
        pair = beyond.to(tl.int32) + (same.to(tl.int32) << 16)
        running = tl.cumsum(pair, 0)
        above_here = above + (running & 0xFFFF)
        equal_here = equal + (running >> 16)
        place = above_here + tl.minimum(equal_here, need) - 1
        tl.store(out + place, column, mask=beyond | (same & (equal_here <= need)))
        total = tl.sum(pair, 0)
        above += total & 0xFFFF
        equal += total >> 16
    for at in range(wanted, kept, BLOCK):
        rest = at + tl.arange(0, BLOCK)
        tl.store(out + rest, tl.full((BLOCK,), -1, tl.int32), mask=rest < kept)


@triton.jit
def _composite(line, winners, place, kept):
    """Pack score and reversed column of winners into int64; absent ones are the lowest number."""
    column = tl.load(winners + place, mask=place < kept, other=-1)
    key = ordered(tl.load(line + column, mask=column >= 0, other=0)).to(tl.int64)
    order = (key << 32) | (0x7FFFFFFF - column).to(tl.int64)
    return tl.where(column >= 0, order, -0x8000000000000000)


@triton.jit
def _column_of(order, start):
    """Unpack the column of ``_composite``, relative to ``start``; -1 where there is none."""
    column = 0x7FFFFFFF - (order & 0x7FFFFFFF)
    return tl.where(order == -0x8000000000000000, -1, column - start).to(tl.int32)


@triton.jit(do_not_specialize=["k", "kept"])
def sort_kernel(logits, row_stride, starts, winners, out, out_stride, k, kept, BLOCK: tl.constexpr):
    """Sort a row's winners, best first, and fill with -1 up to k."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    order = _composite(logits + row * row_stride, winners + row * kept, place, kept)
    order = tl.sort(order, descending=True)
    start = tl.load(starts + row).to(tl.int64)
    out += row * out_stride
    tl.store(out + place, _column_of(order, start), mask=place < k)
    for at in range(BLOCK, k, BLOCK):
        tl.store(out + at + place, tl.full((BLOCK,), -1, tl.int32), mask=at + place < k)


@triton.jit(do_not_specialize=["k", "kept", "columns"])
def rank_kernel(
    logits,
    row_stride,
    starts,
    ends,
    winners,
    out,
    out_stride,
    columns,
    k,
    kept,
    RANKED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Store RANKED of a row's winners, each at the number of better winners; -1 up to k."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    line = logits + row * row_stride
    winners += row * kept
    _, length = _visible_columns(starts, ends, row, columns)
    mine = _composite(line, winners, place, kept)
    rank = tl.full((RANKED,), 0, tl.int32)
    for at in range(0, kept, COMPARED):
        others = _composite(line, winners, at + tl.arange(0, COMPARED), kept)
        rank += tl.sum((others[None, :] > mine[:, None]).to(tl.int32), 1)
    exists = mine != -0x8000000000000000
    start = tl.load(starts + row).to(tl.int64)
    out += row * out_stride
    tl.store(out + rank, _column_of(mine, start), mask=exists)
    beyond = (place >= tl.minimum(length, kept)) & (place < k)
    tl.store(out + place, tl.full((RANKED,), -1, tl.int32), mask=beyond)


def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """Backend of ``interface.topk_per_row`` in Triton; see its contract."""
    rows, columns = logits.shape
    kept = min(k, columns)
    best = out
    if best is None or best.stride(1) != 1:
        best = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if not rows or not kept:
        best.fill_(-1)
        return best if out is None or out is best else out.copy_(best)
    # Scores are passed as integers, so that a kernel sees their bits.
    bits = (logits if logits.stride(1) == 1 else logits.contiguous()).view(torch.int32)
    starts, ends = starts.contiguous(), ends.contiguous()
    winners = winners_of(bits, starts, ends, k)
    by_sorting = choose_topk_config(rows, columns, kept).sorted
    _order_winners(bits, starts, ends, winners, best, by_sorting)
    return best if out is None or out is best else out.copy_(best)


def winners_of(bits: Tensor, starts: Tensor, ends: Tensor, k: int) -> Tensor:
    """Find the columns of each row's k highest scores, ascending.

    Args:
        bits: float32 scores as int32 bits, [M, N] with unit stride in a row; M, N >= 1.
        starts: first column of each row, [M] int32, contiguous.
        ends: one past the last column of each row, [M] int32, contiguous.
        k: number of columns to find, at least 1.

    Returns:
        Columns, then -1, [M, min(k, N)] int32 in scratch memory.
    """
    rows, columns = bits.shape
    kept = min(k, columns)
    config, target = choose_topk_config(rows, columns, kept), target_of(bits.device)
    stride = bits.stride(0)
    winners = scratch((rows, kept), torch.int32, bits.device)
    candidates = winners
    if config.splits > 1:
        candidates = scratch((rows, config.splits * kept), torch.int32, bits.device)
    select_kernel[(rows, config.splits)](
        bits, stride, starts, ends, candidates, candidates, columns, k, kept, config.splits,
        MERGE=False, RESIDENT=config.resident, BLOCK=config.block,
        num_warps=topk_warps(config.block, config.resident, target),
    )  # fmt: skip
    if config.splits > 1:
        select_kernel[(rows, 1)](
            bits, stride, starts, ends, candidates, winners, columns, k, kept, config.splits,
            MERGE=True, RESIDENT=config.merge_resident, BLOCK=config.merge_block,
            num_warps=topk_warps(config.merge_block, config.merge_resident, target),
        )  # fmt: skip
    return winners


def _order_winners(
    bits: Tensor, starts: Tensor, ends: Tensor, winners: Tensor, out: Tensor, by_sorting: bool
) -> None:
    """Write each row's ``winners_of`` to ``out`` [M, k] in the order of their scores.

    They are sorted in a network, or ranked by counting unless ``by_sorting``.
    """
    rows, columns = bits.shape
    kept, k = winners.shape[1], out.shape[1]
    if by_sorting:
        block = max(next_power_of_2(kept), 64)
        sort_kernel[(rows,)](
            bits, bits.stride(0), starts, winners, out, out.stride(0), k, kept,
            BLOCK=block, num_warps=sort_warps(block, target_of(bits.device)),
        )  # fmt: skip
    else:
        rank_kernel[(rows, triton.cdiv(k, _RANKED))](
            bits, bits.stride(0), starts, ends, winners, out, out.stride(0), columns, k, kept,
            RANKED=_RANKED, COMPARED=_COMPARED, num_warps=rank_warps(target_of(bits.device)),
        )  # fmt: skip
