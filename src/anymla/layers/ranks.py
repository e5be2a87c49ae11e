"""The processes that share a model: each has some heads, output groups and experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, distributed


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: number of this process.
        size: how many there are; 1 for a model that is whole.
        group: process group of torch.distributed; None for the default one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def total(self, partial: Tensor) -> Tensor:
        """Sum of every rank's tensor, the same bits on all; ``partial`` may be overwritten."""
        if self.size > 1:
            distributed.all_reduce(partial, group=self.group)
        return partial

    def agree(self, numbers: list[int], device: torch.device) -> list[int]:
        """Rank 0's numbers, on all ranks.

        Ranks compute what they have in common for themselves, and must not drift apart where a
        device's sums depend on the order of its threads.
        """
        if self.size == 1 or not numbers:
            return numbers
        shared = torch.tensor(numbers, device=device)
        distributed.broadcast(shared, group_src=0, group=self.group)
        agreed: list[int] = shared.tolist()
        return agreed

    def share(self, count: int) -> range:
        """This rank's part of ``count`` things, all parts being of one size or nearly so."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


ALONE = Ranks()
