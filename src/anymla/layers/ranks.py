"""The processes that share a model: each has some heads, output groups and experts."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from anymla.ops._inboxes import TURNS, Inboxes, blank_word, word_dtype

# A row's largest logit, its token, and the log-sum of exponentials: ``ops.choice.best_logits``.
Best: TypeAlias = tuple[Tensor, Tensor, Tensor]
# Elements and words that one program exchanges, and rows that choices are exchanged of.
_SUM_SLICE, _CHOICE_WORDS, _MOST_CHOICES = 1024, 4, 1024

# Its name from torch 2.13 on, and before.
_all_gather: Any = getattr(distributed, "all_gather_single", None)
_all_gather = _all_gather or distributed.all_gather_into_tensor


class PeerMemory:
    """Exchange of small tensors through the memory of the ranks' devices, each in one kernel.

    For devices of one machine that reach each other's memory, where it takes as long as a write
    to another device does; see ``ops._inboxes``.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_bytes: int) -> None:
        """Allocate memory that the others see; to be called by all ranks at a time.

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
        """Whether a tensor is of the kind and size that ``total`` adds."""
        return (
            partial.dtype == self._dtype
            and 0 < partial.numel() <= self._sums.capacity
            and partial.is_contiguous()
        )

    def total(self, partial: Tensor) -> Tensor:
        """Sum of every rank's tensor."""
        from anymla.ops._triton_rank_sum import sum_over_ranks

        return sum_over_ranks(partial, self._sums)

    def best(self, best: Best, *, first: int, vocab: int) -> tuple[Tensor, Tensor] | None:
        """See ``Ranks.best``; None for more rows than are exchanged here."""
        from anymla.ops.choice.triton_ranks import best_over_ranks

        if len(best[0]) > _MOST_CHOICES or best[0].dtype != torch.float32:
            return None
        return best_over_ranks(best, self._choices, first=first, vocab=vocab)


def _inboxes(dtype: torch.dtype, device: torch.device, words: int, step: int) -> Inboxes:
    """Blank inboxes on all ranks, for as many words from each, ``step`` of them a program."""
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
        size: how many there are; 1 for a model that is whole.
        group: process group of torch.distributed; None for the default one.
        peers: memory through which small tensors are exchanged in place of the group; None: the
            group does everything.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    peers: PeerMemory | None = None

    def total(self, partial: Tensor) -> Tensor:
        """Sum of every rank's tensor, the same bits on all; ``partial`` may be overwritten."""
        if self.size == 1:
            return partial
        if self.peers is not None and self.peers.takes(partial):
            return self.peers.total(partial)
        distributed.all_reduce(partial, group=self.group)
        return partial

    def gathered(self, part: Tensor) -> Tensor:
        """Every rank's columns side by side, [..., size * m] of each one's [..., m]."""
        if self.size == 1:
            return part
        parts = part.new_empty((self.size * len(part), *part.shape[1:]))
        _all_gather(parts, part.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def best(self, best: Best, *, first: int, vocab: int) -> tuple[Tensor, Tensor]:
        """The best of all ranks' best tokens, the same bits on all ranks.

        Args:
            best: as ``ops.choice.best_logits`` gives them for a part of the vocabulary each.
            first: token of this rank's first logit.
            vocab: tokens of all parts.

        Returns:
            Tokens int64 [n], ``vocab`` for a row without a finite largest logit, and their
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
            rank = values.argmax(1, keepdim=True)  # a NaN is larger than all; the first of equals
            value, token = (each.gather(1, rank).squeeze(1) for each in (values, tokens))
            log_sum = log_sums.logsumexp(1)
        # In fewer launches than isfinite.
        return torch.where(value - value == 0, token, vocab), value - log_sum

    def agreed(self, values: Tensor) -> Tensor:
        """Rank 0's tensor, on all ranks; ``values`` may be overwritten. See ``agree``."""
        if self.size > 1:
            values = values.contiguous()
            distributed.broadcast(values, group_src=0, group=self.group)
        return values

    def agree(self, numbers: list[int], device: torch.device) -> list[int]:
        """Rank 0's numbers, on all ranks.

        Ranks compute what they have in common for themselves, and must not drift apart where a
        device's sums depend on the order of its threads.
        """
        if self.size == 1 or not numbers:
            return numbers
        agreed: list[int] = self.agreed(torch.tensor(numbers, device=device)).tolist()
        return agreed

    def share(self, count: int) -> range:
        """This rank's part of ``count`` things, all parts being of one size or nearly so."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


ALONE = Ranks()
