"""FlashMLA's scheduling metadata: a plan of ``sparse_attention`` that calls share."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.attention import sparse_attention_plan
from anymla.ops.device import target_of


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Scheduling of decode calls: where the first one leaves how it shares out its work.

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


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return scheduling tensors that a caller may put into a ``FlashMLASchedMeta``.

    The first decode call replaces them by a plan of its own, so that they say nothing.

    Args:
        seqlens_k: [b] int32, keys of each request.
        num_q_tokens_per_head_k: queries a KV head; ignored, as is all that follows.
        h_k: number of KV heads.
        h_q: number of query heads.
        is_fp8_kvcache: True for caches of FP8 rows.
        topk: columns of the lists, or None for dense decode.
        use_legacy: True for FlashMLA's kernels before September 2026.

    Returns:
        int32 [SMs, 8] and [b + 1], zeros on the device of ``seqlens_k``; one SM without a GPU.
    """
    sms = target_of(seqlens_k.device).sm_count
    schedule = torch.zeros(sms, 8, dtype=torch.int32, device=seqlens_k.device)
    return schedule, schedule.new_zeros(len(seqlens_k) + 1)
