"""FlashMLA's scheduling metadata: a plan of ``sparse_attention`` that calls share."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.sparse_attention import sparse_attention_plan


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What ``get_mla_metadata`` returns: where the first call leaves how it shares out its work.

    Later calls of the same shapes follow it, as the layers of a step do. Any other call may reuse
    it as well: one of other shapes makes its own, and lists of other lengths are only shared out
    less evenly.

    Attributes:
        have_initialized: a call has been made.
        config: of that call: shapes, device, and whether a graph was being captured.
        tile_scheduler_metadata: int32, a plan of ``sparse_attention``, or None if it needs none.
        num_splits: None.
    """

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def plan(
        self,
        lengths: Tensor | None,
        extra_lengths: Tensor | None,
        heads: int,
        width: int,
        extra_width: int | None,
    ) -> Tensor | None:
        """The plan of a call with these lengths [T] and widths of lists."""
        some = extra_lengths if lengths is None else lengths
        if some is None or not some.is_cuda or torch.compiler.is_compiling():
            return None
        # What a graph writes is not there before it is replayed.
        capturing = torch.cuda.is_current_stream_capturing()
        config = (len(some), heads, width, extra_width, some.device, capturing)
        if not self.have_initialized or self.config != config:
            self.tile_scheduler_metadata = sparse_attention_plan(
                lengths, extra_lengths, heads=heads, width=width, extra_width=extra_width
            )
            self.have_initialized, self.config = True, config
        return self.tile_scheduler_metadata


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """The scheduling argument of ``flash_mla_with_kvcache``, empty; all arguments are ignored.

    One for the layers of a step whose lists are as long; it is filled by the first of them.
    """
    return FlashMLASchedMeta(), None
