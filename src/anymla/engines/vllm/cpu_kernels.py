"""Replacements of vLLM's Triton kernels for a step's metadata, for machines without Triton.

Each function takes the arguments of the kernel that ``pinned.METADATA_KERNELS`` names, in order;
pointers arrive as tensors. The module can be deleted once a Triton compiler for CPUs can be
installed, or vLLM's CPU platform registers functions of its own for these kernels, as it does for
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops.step_indices import slot_mapping, token_to_request, window_rows


def token_request_mapping(
    starts: Tensor, output: Tensor, num_reqs: int, num_mapped: int, num_tokens: int, **_: Any
) -> None:
    """Write the request of each token; 0 for padding."""
    output[:num_tokens] = token_to_request(starts, num_tokens).clamp(min=0)


def prefill_gather_lengths(
    gather_lens: Tensor, seq_lens: Tensor, starts: Tensor, replay_start: Tensor, *rest: int
) -> None:
    """Write the number of window rows that vLLM would gather for each prefill."""
    num_prefills, num_decodes, window, _ = rest
    prefills = slice(num_decodes, num_decodes + num_prefills)
    query_lens = starts.diff()[prefills]
    gather_lens[:num_prefills] = torch.minimum(seq_lens[prefills], query_lens + window - 1)


def window_indices(*arguments: Any) -> None:
    """Write the window slots of tokens from an offset on (DeepSeek-V4 replays no window)."""
    indices, _, lens, window, _, _, _, starts, seq_lens, token_to_req, valid = arguments[:11]
    table, _, block_size, _, offset, has_image, _ = arguments[11:]
    assert not has_image
    tokens = slice(offset, min(len(valid), offset + len(lens)))
    slots, counts = window_rows(
        _positions(starts, seq_lens, len(valid))[tokens],
        token_to_req[tokens],
        table,
        block_size=block_size,
        window=window,
        is_valid_token=valid[tokens],
    )
    indices.squeeze(1)[: len(slots)] = slots
    lens[: len(counts)] = counts


def compressed_slots(*arguments: Any) -> None:
    """Write the slot of the entry that each token completes, or the padding's slot."""
    compressed, slots, starts, seq_lens, table, _, page_size, ranks, _ = arguments[:9]
    ratio, padding, _ = arguments[9:]
    assert ranks == 1
    tokens = len(compressed)
    positions, request = _positions(starts, seq_lens, tokens), token_to_request(starts, tokens)
    closed = slot_mapping(positions, request, table, page_size=page_size, ratio=ratio)
    compressed.copy_(torch.where(slots[:tokens] == padding, padding, closed))


def _positions(starts: Tensor, seq_lens: Tensor, tokens: int) -> Tensor:
    """Return positions int64 [tokens]: a request's last token is at its sequence length minus 1."""
    request = token_to_request(starts, tokens).clamp(min=0).long()
    return seq_lens[request].long() - (starts[request + 1] - torch.arange(tokens))
