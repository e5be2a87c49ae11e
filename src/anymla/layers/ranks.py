"""The processes that share a model: each has some heads, output groups and experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, distributed

_ALIGNMENT = 16  # bytes that a thread of the one-shot kernel moves
# Its name from torch 2.13 on, and before.
_all_gather: Any = getattr(distributed, "all_gather_single", None)
_all_gather = _all_gather or distributed.all_gather_into_tensor


class OneShotSums:
    """Sums of small tensors in one kernel, which reads all ranks' from their devices' memory.

    For devices of one machine that read each other's. A call of few rows takes as long as two
    barriers between the devices, where a ring goes round. torch's own kernel (symmetric memory)
    adds in the order of the ranks, so that all have the same bits.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_bytes: int) -> None:
        """Allocate memory that the others see; to be called by all ranks at a time.

        Args:
            dtype: of the tensors.
            device: of this rank.
            num_bytes: of the largest tensor.

        Raises:
            RuntimeError: the devices cannot share memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        assert distributed.group.WORLD is not None
        self._group: str = distributed.group.WORLD.group_name
        self._buffer = symmetric.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def takes(self, partial: Tensor) -> bool:
        """Whether a tensor is of the kind and size that this is for."""
        return (
            partial.dtype == self._buffer.dtype
            and 0 < partial.nbytes <= self._buffer.nbytes
            and partial.nbytes % _ALIGNMENT == 0
            and partial.data_ptr() % _ALIGNMENT == 0
            and partial.is_contiguous()
        )

    def __call__(self, partial: Tensor) -> Tensor:
        """The sum, in the place of ``partial``."""
        shared = self._buffer[: partial.numel()].view(partial.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy_out(
            shared, partial, "sum", self._group, partial
        )
        return total


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: number of this process.
        size: how many there are; 1 for a model that is whole.
        group: process group of torch.distributed; None for the default one.
        one_shot: adds what it takes, in place of the group; None: the group adds everything.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    one_shot: OneShotSums | None = None

    def total(self, partial: Tensor) -> Tensor:
        """Sum of every rank's tensor, the same bits on all; ``partial`` may be overwritten."""
        if self.size == 1:
            return partial
        if self.one_shot is not None and self.one_shot.takes(partial):
            return self.one_shot(partial)
        distributed.all_reduce(partial, group=self.group)
        return partial

    def gathered(self, part: Tensor) -> Tensor:
        """Every rank's columns side by side, [..., size * m] of each one's [..., m]."""
        if self.size == 1:
            return part
        parts = part.new_empty((self.size * len(part), *part.shape[1:]))
        _all_gather(parts, part.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

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
