"""Log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Rows of logits in one block stay below this many elements (16 MiB of float32), at least one row.
_BLOCK_ELEMENTS = 1 << 22


def next_token_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Sequence[int], vocab_size: int
) -> list[float]:
    """Log-probability, natural and in float32, of the token that follows each row.

    Args:
        logits_of: maps streams [n, N, D] to logits [n, V].
        hidden: [T, N, D].
        targets: T token ids.
        vocab_size: V; the logits are computed in blocks of rows, so that long prompts do not
            take T * V numbers at once.
    """
    rows = max(1, _BLOCK_ELEMENTS // vocab_size)
    blocks = []
    for start in range(0, len(targets), rows):
        block = hidden[start : start + rows]
        ids = torch.tensor(targets[start : start + rows], device=hidden.device)
        logprobs = logits_of(block).float().log_softmax(-1)
        blocks.append(logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    logprobs_of_all: list[float] = torch.cat(blocks).tolist() if blocks else []
    return logprobs_of_all
