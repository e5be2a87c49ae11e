"""One token on the host: what a decode step of one request needs, in as few calls as possible.

A call costs more here than most of the arithmetic (0.27 ms against 0.38 ms through the general
path, 8 heads and 228 rows on one core), so there is no tile, no mask and no second dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.sparse_attention.torch_rows import Rows, read_side_by_side

# Below this many (head, row) pairs, two float32 products take no longer than the three in bfloat16
# of ``torch_softmax`` (measured on an AVX512-BF16 core).
FLOAT32_PAIRS = 5120


def attend_single(
    q: Tensor,
    listed: list[tuple[Rows, Tensor, Tensor | None]],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor | None:
    """Attend one token to rows that all exist.

    Args:
        q: [1, H, D].
        listed: rows, slots [1, K] and lengths [1] of each cache.
        sink: [H], or None.
        scale: of the scores.
        out: [1, H, value dim], any float dtype; written.
        peaks: [1, H] to write the largest scores into, or None.

    Returns:
        lse [1, H] in float32 (float64 for float64 q); None, with nothing written, if the call is
        too large or lists nothing, or something that is not there.
    """
    sources = []
    total = 0
    for rows, index, lengths in listed:
        count = index.shape[1]
        if lengths is not None:
            count = min(count, int(lengths))
        if count <= 0:
            continue
        slots = index[:, :count]
        low, high = torch.aminmax(slots)
        if int(low) < 0 or int(high) >= rows.size:
            return None
        sources.append((rows, slots))
        total += count
    if not 0 < total * q.shape[1] <= FLOAT32_PAIRS:
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    rows_read = torch.empty((1, total, q.shape[2]), dtype=wide)
    read_side_by_side(sources, rows_read)
    matrix = rows_read[0]
    scores = torch.mm(q[0].to(wide), matrix.T).mul_(scale)
    weights = torch.softmax(scores, -1)
    # The largest weight is exp(0) / sum, which gives the sum back.
    largest = scores.amax(-1)
    if peaks is not None:
        peaks[0] = largest
    lse = largest.sub_(weights.amax(-1).log_())
    if sink is not None:
        weights.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
    out[0] = torch.mm(weights, matrix[:, : out.shape[2]])
    return lse.unsqueeze(0)
