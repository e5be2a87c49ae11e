"""FlashMLA's scheduling metadata: a plan of ``sparse_attention`` that calls share."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.attention import sparse_attention_plan
from anymla.ops.device import target_of


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Scheduling of decode calls, which holds the work distribution of the first call.

    Later calls of the same shapes follow it, as the layers of a step do. Any other call may reuse
    the object as well: a call of other shapes makes its own plan, and lists of other lengths are
    only distributed less evenly.

    Attributes:
        have_initialized: True after the first call.
        config: shapes and device of that call, and whether it was captured in a graph.
        tile_scheduler_metadata: int32 plan of ``sparse_attention``, or None if it needs none.
        num_splits: always None, for compatibility.
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
        """Return the plan for these lengths [T] and widths of lists."""
        some = extra_lengths if lengths is None else lengths
        if some is None or not some.is_cuda or torch.compiler.is_compiling():
            return None
        # A plan written inside a graph does not exist before the graph is replayed.
        capturing = torch.cuda.is_current_stream_capturing()
        config = (len(some), heads, width, extra_width, some.device, capturing)
        if not self.have_initialized or self.config != config:
            self.tile_scheduler_metadata = sparse_attention_plan(
                lengths, extra_lengths, heads=heads, width=width, extra_width=extra_width
            )
            self.have_initialized, self.config = True, config
        return self.tile_scheduler_metadata


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty scheduling argument of ``flash_mla_with_kvcache``; ignore all arguments.

    The layers of a step whose lists are equally long share one; the first of them fills it.
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

    The first decode call replaces them by its own plan, so their values have no meaning.

    Args:
        seqlens_k: int32 [b], number of keys of each request.
        num_q_tokens_per_head_k: queries per KV head; ignored, as are all later arguments.
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
