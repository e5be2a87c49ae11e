"""Pooled entries with gradients.

The forward pass is the compressor that serves, over one step that holds whole sequences; the
backward pass keeps the inputs and recomputes the pooling weights. Letters: T tokens, E entries, D
channels of an entry, W = D or, with overlapping windows, 2 D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import LAYOUT_IDS, get_layout
from anymla.ops.compressor import compress_norm, compress_norm_rope_insert, save_partial_states
from anymla.ops.norm_rope import rope as rotate
from anymla.train.norm_rope import rms_norm_grad
from anymla.train.operator import Gradients, differentiable
from anymla.train.plan import Plan
from anymla.train.windows import Windows, windows_of

# Rows of a page of entries; kernels are compiled for it.
_PAGE = 64
# Elements of kv that are differentiated at a time.
_BLOCK = 1 << 24


def compress(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    eps: float,
    rope: Tensor | None,
    positions: Tensor | None = None,
) -> Tensor:
    """Pool the whole windows of packed sequences to entries.

    With s_i = gate_i + ape[i mod ratio] over the tokens i of a window, channel by channel,

        c = sum_i softmax_i(s_i) kv_i           entry = rope(c / sqrt(mean(c^2) + eps) weight)

    If kv is twice as wide as weight, windows overlap as at ratio 4: an entry pools the first half
    of the channels of the window before, where its sequence has one, and the second half of its
    own. Entries are those of ``compress_norm_rope_insert``, bit for bit, before they are encoded.

    Args:
        kv: projected values, [T, W] float32 (or float64), any token stride.
        gate: projected gate logits, [T, W] of kv's dtype, any token stride.
        ape: bias by position within the window, [ratio, W] of kv's dtype.
        weight: weight of the RMS norm, [D] floating point.
        plan: plan of the sequences, of the ratio of ``ape``.
        eps: number added to the mean square.
        rope: rotary table as in ``norm_rope.rope``, [L, R] float32 (or float64); None for entries
            before rotation, as V4.1 projects its index keys from them.
        positions: positions that entries are rotated by, [E] int64; None for that of each window's
            first token in its sequence.

    Returns:
        Entries [E, D] in kv's dtype, E = ``plan.num_entries``, sequence after sequence; rows behind
        the last entry are zero. Gradients reach kv, gate, ape and weight; they are zero for tokens
        without an entry.

    Raises:
        TypeError, ValueError: a dtype, shape or device differs from the above.
    """
    if len(ape) != plan.ratio or len(kv) != plan.tokens:
        raise ValueError(
            f"compress: ape [{len(ape)}, W] and kv [{len(kv)}, W] must have the plan's ratio "
            f"{plan.ratio} and its {plan.tokens} tokens"
        )
    if kv.shape[1] not in (len(weight), 2 * len(weight)):
        raise ValueError(f"compress: kv must be [T, D] or [T, 2 D], D = {len(weight)}")
    windows = windows_of(plan).tensors()
    entries: Tensor = _pooled_entries(kv, gate, ape, weight, windows, eps, rope, positions)
    return entries


def _compress(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    numbered: list[Tensor],
    eps: float,
    rope: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Run a step of the serving compressor on fresh states, a page of states for each window."""
    windows, width = Windows(len(ape), *numbered), len(weight)
    count = len(windows.whole)
    layout = f"rows_fp32_{width}"
    stores = positions is None and kv.dtype == torch.float32 and layout in LAYOUT_IDS
    out = kv.new_zeros(-(-count // _PAGE) * _PAGE, width)
    if not count:
        return out
    state = kv.new_empty(count, windows.ratio, 2 * kv.shape[1])
    save_partial_states(
        kv, gate, ape, windows.position, state, windows.slot, compress_ratio=windows.ratio
    )
    step = state, windows.table, windows.slot, windows.sequence, windows.position, weight
    window: dict[str, Any] = {"compress_ratio": windows.ratio, "overlap": kv.shape[1] != width}
    if stores and rope is not None:
        cache = out.view(-1, _PAGE, width)
        get_layout(layout).check(cache, "compress", "entries")
        compress_norm_rope_insert(*step, eps, rope, cache, windows.entry, layout=layout, **window)
        return out[:count]
    # The closing token of an entry has its row; rows behind the last entry stay zero.
    closed = compress_norm(*step, eps, **window).index_select(0, windows.last)
    entries = torch.where(windows.whole.unsqueeze(1), closed, 0)
    if rope is None:
        return entries
    at = windows.start if positions is None else positions
    rotated: Tensor = rotate(entries.unsqueeze(1), at, rope)
    return rotated.squeeze(1)


def _compress_backward(
    grads: list[Tensor],
    needs: list[bool],
    kept: list[Tensor],
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    weight: Tensor,
    numbered: list[Tensor],
    eps: float,
    rope: Tensor | None,
    positions: Tensor | None,
) -> Gradients:
    (dy,) = grads
    windows, overlap = Windows(len(ape), *numbered), kv.shape[1] != len(weight)
    if rope is not None:
        at = windows.start if positions is None else positions
        dy = rotate(dy.unsqueeze(1), at, rope, inverse=True).squeeze(1)
    dy = torch.where(windows.whole.unsqueeze(1), dy, 0)
    count, ratio, width = len(dy), windows.ratio, len(weight)
    # By window. The first half of a token's channels is pooled by the entry after its window's.
    dkv = kv.new_zeros(count, ratio, kv.shape[1])
    dgate = torch.zeros_like(dkv)
    dweight = dy.new_zeros(width)
    step = max(1, _BLOCK // (2 * ratio * width))
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        values, scores = _pooled(kv, gate, ape, windows, part, overlap)
        p = scores.softmax(1)
        pooled = (p * values).sum(1)
        dpooled, more = rms_norm_grad(pooled, weight, eps, dy[part])
        dweight += more
        dvalues = p * dpooled.unsqueeze(1)
        dscores = dvalues * (values - pooled.unsqueeze(1))
        for into, grad in ((dkv, dvalues), (dgate, dscores)):
            into[part, :, -width:] = grad[:, -ratio:]
            if overlap:
                skip = int(not first)  # no entry precedes the first
                into[first + skip - 1 : part.stop - 1, :, :width] = grad[skip:, :ratio]
    dape = dgate.sum(0)
    gone = (windows.slot < 0).unsqueeze(1)
    at = windows.slot.clamp(min=0)
    dkv, dgate = (
        x.flatten(0, 1).index_select(0, at).masked_fill_(gone, 0) if count else zeros
        for x, zeros in ((dkv, torch.zeros_like(kv)), (dgate, torch.zeros_like(gate)))
    )
    return dkv, dgate, dape, dweight.to(weight.dtype)


def _pooled(
    kv: Tensor, gate: Tensor, ape: Tensor, windows: Windows, part: slice, overlap: bool
) -> tuple[Tensor, Tensor]:
    """Gather the values and scores that some entries pool, each [n, ratio or 2 ratio, D]."""
    whole = windows.whole[part].view(-1, 1, 1)

    def gathered(tokens: Tensor, half: slice, there: Tensor) -> tuple[Tensor, Tensor]:
        # A value that is not pooled has probability 0, and may be NaN.
        size, rows = tokens.shape, tokens.flatten()
        values = kv[:, half].index_select(0, rows).unflatten(0, size)
        scores = gate[:, half].index_select(0, rows).unflatten(0, size) + ape[:, half]
        return torch.where(there, values, 0), torch.where(there, scores, -1e30)

    width = kv.shape[1] // 2 if overlap else kv.shape[1]
    own = gathered(windows.tokens[part], slice(kv.shape[1] - width, None), whole)
    if not overlap:
        return own
    before = (torch.arange(part.start, part.stop, device=kv.device) - 1).clamp(min=0)
    follows = windows.follows[part].view(-1, 1, 1)
    older = gathered(windows.tokens.index_select(0, before), slice(width), follows)
    return torch.cat((older[0], own[0]), 1), torch.cat((older[1], own[1]), 1)


def _compress_fake(
    kv: Tensor, gate: Tensor, ape: Tensor, weight: Tensor, numbered: list[Tensor], *_: Any
) -> Tensor:
    return kv.new_empty(len(numbered[-1]), len(weight))


_pooled_entries = differentiable(_compress, _compress_backward, _compress_fake, learns=4)
