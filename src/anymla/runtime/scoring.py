"""Log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Rows of logits in one block stay below this many elements (16 MiB of float32), at least one row.
_BLOCK_ELEMENTS = 1 << 22


def block_rows(vocab_size: int) -> int:
    """Return the rows of logits in one block."""
    return max(1, _BLOCK_ELEMENTS // vocab_size)


def chosen_logprobs(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the natural log-probability of one token [n] for each row of logits [n, V]."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    listed: list[float] = token_logprobs(logits, ids).tolist()
    return listed


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return natural log-probabilities, float32 [n], of ids int64 [n] in logits [n, V]."""
    ids = ids.clamp(max=logits.shape[-1] - 1).unsqueeze(-1)
    return logits.float().log_softmax(-1).gather(-1, ids).squeeze(-1)


def next_token_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Sequence[int], vocab_size: int
) -> list[float]:
    """Return the natural log-probability of the token that follows each row.

    The logits are computed in blocks of rows, so that long prompts need no T * V buffer.

    Args:
        logits_of: function from streams [n, N, D] to logits [n, V].
        hidden: streams after the last layer, [T, N, D].
        targets: T token ids, the successor of each row.
        vocab_size: V, the size of the vocabulary.
    """
    rows = block_rows(vocab_size)
    logprobs: list[float] = []
    for start in range(0, len(targets), rows):
        logits = logits_of(hidden[start : start + rows])
        logprobs += chosen_logprobs(logits, targets[start : start + rows])
    return logprobs
