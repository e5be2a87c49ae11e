"""Inboxes through which the GPUs of one machine exchange small tensors without a barrier.

Every rank owns an inbox that all ranks can write, with three turns of one slot per sender. A rank
writes its words into its slot of every inbox, then polls its own inbox until all words have
arrived; a word that has not arrived is still blank. The words of one turn are blanked during the
next turn, and a turn is only reused after a rank has received from all others in between, so nobody
writes where somebody still reads. (NCCL's LL protocol puts a flag beside each word instead.)

The blank word is the floating-point type's negative zero; a negative zero is sent as zero. Each
program of a kernel counts its own turns for the slice of the slots that only it uses, so launches
of different sizes may follow each other, as long as all ranks launch the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

TURNS = 3
_WORDS = {2: torch.int16, 4: torch.int32}


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype that holds a floating-point dtype's bits."""
    return _WORDS[dtype.itemsize]


def blank_word(dtype: torch.dtype) -> int:
    """Return the word of an integer dtype that marks a value that has not arrived."""
    return torch.iinfo(dtype).min


@dataclasses.dataclass(frozen=True)
class Inboxes:
    """Inboxes of all ranks, as mapped by one rank.

    Attributes:
        addresses: start address of each rank's inbox, int64 [R] on the device; an inbox is words
            [TURNS, R, capacity], all blank before the first exchange.
        turns: next turn of each program, int32 [programs] on the device, 0 before the first
            exchange.
        capacity: number of words in a slot, the same for every program.
        rank: number of this rank, 0 .. R - 1.
        dtype: integer dtype of a word.
        memory: any object that keeps the memory mapped while it lives.
    """

    addresses: Tensor
    turns: Tensor
    capacity: int
    rank: int
    dtype: torch.dtype
    memory: Any = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)
