"""Memory through which the GPUs of one machine give each other small tensors.

Every rank owns an inbox that all ranks can write: three turns of a slot for each rank. A rank
writes its words into its slot of everybody's inbox and reads its own inbox until all have arrived:
there is no barrier, since a word that has not arrived is still blank. What arrives in a turn is
blanked during the next one, and a turn comes again only after a rank has received from all others
in between, so that nobody writes where somebody still reads. (NCCL's LL protocol has a flag beside
each word instead.)

The blank word is the negative zero of the floating-point type, which is sent as zero. Each program
of a kernel counts its own turns, for the slice of all slots that it alone uses: launches of
different sizes may follow each other, as long as all ranks launch the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

TURNS = 3
_WORDS = {2: torch.int16, 4: torch.int32}


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Integers that hold a floating-point type's values."""
    return _WORDS[dtype.itemsize]


def blank_word(dtype: torch.dtype) -> int:
    """The word that has not arrived, of an integer type."""
    return torch.iinfo(dtype).min


@dataclasses.dataclass(frozen=True)
class Inboxes:
    """The inboxes of all ranks, as one rank reaches them.

    Attributes:
        addresses: int64 [R] on the device, where each rank's inbox begins: words
            [TURNS, R, capacity], all blank before the first exchange.
        turns: int32 [programs] on the device, the next turn of each program, 0 before the first
            exchange.
        capacity: words of a slot, as many for each program as it exchanges.
        rank: number of this rank.
        dtype: integer type of a word.
        memory: whatever keeps the memory mapped.
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
