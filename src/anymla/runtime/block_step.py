"""The step of a DSpark drafter's blocks: rows that each token sees, and slots of block rows.

A block's rows never enter the pages of its request. They lie in a cache of the drafter's own, one
page a block, and are overwritten by the next block. The pages of a request hold rows of final
positions only, so that a wrong guess leaves nothing to undo.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.layers.rows import GroupStep, Rows
from anymla.layers.spec import CONTEXT_ROWS, WINDOW_GROUP
from anymla.layers.step import Step
from anymla.ops.step_indices import window_rows
from anymla.runtime.device_step import numbers


def block_step(
    context: GroupStep,
    anchors: Tensor,
    last: Tensor,
    *,
    size: int,
    noise_token_id: int,
    window: int,
    max_seq_len: int,
    present: Tensor | None = None,
    backend: str | None = None,
) -> Step:
    """Build the step of one block a request.

    The block of request r stands at positions last[r] + 1 .. last[r] + size and begins with its
    anchor. Each of its rows sees the context, positions max(0, last[r] - window + 1) .. last[r],
    and all rows of the block: the window is the same for all rows of a block.

    Args:
        context: step metadata of the window group, one row of its block table a request.
        anchors: int64 [R], token ids at positions last + 1.
        last: int64 [R], position of each request's last final token.
        size: rows of a block, which is also the page size of the blocks' cache.
        noise_token_id: token id of all rows of a block but the first.
        window: number of context positions that a block sees.
        max_seq_len: longest request, its block not counted.
        present: bool [R], False for padding requests; None if there is no padding.
        backend: name of the backend of the selection operation; None for the best.

    Returns:
        A step of R * size tokens whose window rows are the blocks' (``Step.window``), in slots
        0 .. R * size - 1, and whose context is ``Step.dense[CONTEXT_ROWS]``.
    """
    requests, device = len(anchors), anchors.device
    count = requests * size
    request = numbers(0, requests, torch.int32, device)
    pages = request.unsqueeze(1)
    slots = numbers(0, count, torch.int64, device)
    own = numbers(0, count, torch.int32, device).view(requests, 1, size).expand(-1, size, -1)
    if present is None:
        is_valid = torch.ones(count, dtype=torch.bool, device=device)
        lengths = torch.full((count,), size, dtype=torch.int32, device=device)
    else:
        request = torch.where(present, request, -1)
        is_valid = present.unsqueeze(1).expand(-1, size).reshape(count)
        slots = torch.where(is_valid, slots, -1)
        own = torch.where(present.view(requests, 1, 1), own, -1)
        lengths = is_valid * numbers(size, size + 1, torch.int32, device)
    own = own.reshape(count, size)
    seen = window_rows(
        last,
        request,
        context.block_table,
        block_size=context.page_size,
        window=window,
        backend=backend,
    )
    token_ids = torch.full((requests, size), noise_token_id, device=device)
    token_ids[:, 0] = anchors
    ahead = numbers(1, size + 1, torch.int64, device)
    return Step(
        token_ids=token_ids.flatten(),
        positions=(last.unsqueeze(1) + ahead).flatten(),
        token_to_req=request.repeat_interleave(size, output_size=count),
        is_valid=is_valid,
        seq_lens=(last + 1 + size).int(),
        query_start_loc=numbers(0, count + 1, torch.int32, device, size),
        query_lens=(size,) * requests,
        num_decodes=requests,
        max_seq_len=max_seq_len + size,
        groups={WINDOW_GROUP: GroupStep(pages, slots, size)},
        window=Rows(own, lengths),
        dense={
            CONTEXT_ROWS: Rows(
                *(each.repeat_interleave(size, 0, output_size=count) for each in seen)
            )
        },
        index_lens={},
        padded=present is not None,
    )
