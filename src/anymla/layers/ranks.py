"""The ranks that share a model: each has some heads, output groups and experts."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from anymla.ops._inboxes import TURNS, Inboxes, blank_word, word_dtype

# Per row: largest logit, its token, and log-sum of exponentials; see ``ops.choice.best_logits``.
Best: TypeAlias = tuple[Tensor, Tensor, Tensor]
# Elements and words that one program exchanges, and the largest number of rows of choices.
_SUM_SLICE, _CHOICE_WORDS, _MOST_CHOICES = 1024, 4, 1024

# The function's name from torch 2.13 on; None before.
_all_gather: Any = getattr(distributed, "all_gather_single", None)
_all_gather = _all_gather or distributed.all_gather_into_tensor


class PeerMemory:
    """Exchange of small tensors through the memory of the ranks' devices, in one kernel each.

    For devices of one machine that can access each other's memory, where an exchange takes one
    write to another device; see ``ops._inboxes``.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_bytes: int) -> None:
        """Allocate memory that all ranks can access; all ranks must call it together.

        Args:
            dtype: dtype of the tensors that are added.
            device: device of this rank.
            num_bytes: bytes of the largest tensor that is added.

        Raises:
            RuntimeError: the devices cannot share memory.
        """
        self._dtype = dtype
        self._sums = _inboxes(dtype, device, num_bytes // dtype.itemsize, _SUM_SLICE)
        self._choices = _inboxes(
            torch.float32, device, _CHOICE_WORDS * _MOST_CHOICES, _CHOICE_WORDS
        )
        torch.cuda.synchronize(device)
        distributed.barrier()

    def takes(self, partial: Tensor) -> bool:
        """True if ``total`` can add a tensor of this dtype and size."""
        return (
            partial.dtype == self._dtype
            and 0 < partial.numel() <= self._sums.capacity
            and partial.is_contiguous()
        )

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum of every rank's tensor."""
        from anymla.ops._triton_rank_sum import sum_over_ranks

        return sum_over_ranks(partial, self._sums)

    def best(self, best: Best, *, first: int, vocab: int) -> tuple[Tensor, Tensor] | None:
        """Choose as ``Ranks.best`` does; None for more rows than can be exchanged here."""
        from anymla.ops.choice.triton_ranks import best_over_ranks

        if len(best[0]) > _MOST_CHOICES or best[0].dtype != torch.float32:
            return None
        return best_over_ranks(best, self._choices, first=first, vocab=vocab)


def _inboxes(dtype: torch.dtype, device: torch.device, words: int, step: int) -> Inboxes:
    """Allocate blank inboxes on all ranks, ``words`` from each, ``step`` of them a program."""
    from torch.distributed import _symmetric_memory as symmetric

    assert distributed.group.WORLD is not None
    word, size = word_dtype(dtype), distributed.get_world_size()
    memory = symmetric.empty(TURNS * size * words, dtype=word, device=device)
    memory.fill_(blank_word(word))
    handle = symmetric.rendezvous(memory, distributed.group.WORLD.group_name)
    return Inboxes(
        torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        torch.zeros(words // step, dtype=torch.int32, device=device),
        words,
        distributed.get_rank(),
        word,
        (memory, handle),
    )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: number of this process.
        size: number of ranks; 1 for a model that is whole.
        group: process group of torch.distributed; None for the default one.
        peers: memory through which small tensors are exchanged instead of the group; None to use
            the group for everything.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    peers: PeerMemory | None = None

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum of every rank's tensor, bitwise equal on all; overwrites ``partial``."""
        if self.size == 1:
            return partial
        if self.peers is not None and self.peers.takes(partial):
            return self.peers.total(partial)
        distributed.all_reduce(partial, group=self.group)
        return partial

    def gathered(self, part: Tensor) -> Tensor:
        """Concatenate every rank's columns [..., m] to [..., size * m]."""
        if self.size == 1:
            return part
        parts = part.new_empty((self.size * len(part), *part.shape[1:]))
        _all_gather(parts, part.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def best(self, best: Best, *, first: int, vocab: int) -> tuple[Tensor, Tensor]:
        """Return the best of all ranks' best tokens, bitwise equal on all ranks.

        Args:
            best: results of ``ops.choice.best_logits`` for this rank's part of the vocabulary.
            first: token id of this rank's first logit.
            vocab: number of tokens of all parts.

        Returns:
            Tokens int64 [n], ``vocab`` for a row without a finite largest logit, and their natural
            log-probabilities [n].
        """
        value, token, log_sum = best
        if self.size > 1:
            if self.peers is not None:
                found = self.peers.best(best, first=first, vocab=vocab)
                if found is not None:
                    return found
            values, log_sums = (self.gathered(each.unsqueeze(1)) for each in (value, log_sum))
            tokens = self.gathered((token + first).unsqueeze(1))
            rank = values.argmax(1, keepdim=True)  # NaN counts as the largest; of equals, the first
            value, token = (each.gather(1, rank).squeeze(1) for each in (values, tokens))
            log_sum = log_sums.logsumexp(1)
        # Fewer launches than isfinite takes.
        return torch.where(value - value == 0, token, vocab), value - log_sum

    def agreed(self, values: Tensor) -> Tensor:
        """Return rank 0's tensor on all ranks; may overwrite ``values``. See ``agree``."""
        if self.size > 1:
            values = values.contiguous()
            distributed.broadcast(values, group_src=0, group=self.group)
        return values

    def agree(self, numbers: list[int], device: torch.device) -> list[int]:
        """Return rank 0's numbers on all ranks.

        Each rank computes shared decisions by itself; they must not diverge if a device's sums
        depend on the order of its threads.
        """
        if self.size == 1 or not numbers:
            return numbers
        agreed: list[int] = self.agreed(torch.tensor(numbers, device=device)).tolist()
        return agreed

    def share(self, count: int) -> range:
        """Return this rank's part of ``count`` things; parts differ in size by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


ALONE = Ranks()
