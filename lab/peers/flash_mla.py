"""FlashMLA: decode over the paged FP8 caches, and attention to listed rows during prefill.

Its scheduler metadata is made once for a shape, as an engine does. Where it does not take the
number of heads, it gets zero queries up to a multiple of 64, and lists -1 up to one of 64 columns;
neither is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.ops.attention import CacheRows
from lab.peers import Peer

if TYPE_CHECKING:
    from lab.cases.sparse_attention import DecodeInputs

_HEADS, _LIST_STEP = 64, 64


class FlashMla(Peer):
    """FlashMLA's functions, as vLLM ships them or by themselves."""

    name, title = "flash_mla", "FlashMLA"
    modules: tuple[str, ...] = (
        "vllm.third_party.flashmla.flash_mla_interface",
        "flash_mla",
    )

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of FlashMLA's decode, one for each set of lists."""
        q, sink = padded_heads(inputs.q, inputs.sink)
        cache, model = inputs.cache.unsqueeze(2), inputs.shape.model
        schedule, _ = self.module.get_mla_metadata()
        given: dict[str, Any] = {"attn_sink": sink, "topk_length": inputs.lengths}
        if inputs.shape.v32:
            cache, given = cache.view(torch.float8_e4m3fn), {}
        if inputs.extra_cache is not None:
            given["extra_k_cache"] = inputs.extra_cache.unsqueeze(2)
            given["extra_topk_length"] = inputs.extra_lengths
        calls: list[Callable[[], Tensor]] = []
        for window, extra in inputs.lists:
            more = {} if extra is None else {"extra_indices_in_kvcache": _in_steps(extra)}
            calls.append(
                functools.partial(
                    _first, self.module.flash_mla_with_kvcache, q, cache, None, None,
                    model.out_dim, schedule, None, model.dim**-0.5, False, True, window,
                    **given, **more,
                )
            )  # fmt: skip
        return calls

    def rows(
        self, q: Tensor, rows: Tensor, listed: Tensor, lengths: Tensor, sink: Tensor
    ) -> Tensor:
        """Call ``flash_mla_sparse_fwd`` for heads [T, H, 512] over rows [N, 512]."""
        out: Tensor = self.module.flash_mla_sparse_fwd(
            q, rows.unsqueeze(1), listed.unsqueeze(1), 512**-0.5, 512, sink, lengths
        )[0]
        return out

    def attend(
        self,
        schedules: dict[tuple[object, ...], Any],
        q: Tensor,
        rows: Sequence[CacheRows],
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
        out: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Run ``sparse_attention`` with the schedules that were made for earlier shapes."""
        heads = q.shape[1]
        q, sink = padded_heads(q, sink)
        window = rows[0]
        more: dict[str, Any] = {"attn_sink": sink, "topk_length": window.lengths}
        for each in rows[1:]:
            more["extra_k_cache"] = each.cache.unsqueeze(2)
            more["extra_indices_in_kvcache"] = _in_steps(each.indices).unsqueeze(1)
            more["extra_topk_length"] = each.lengths
        shape = (*q.shape, *(each.width for each in rows))
        if shape not in schedules:
            schedules[shape] = self.module.get_mla_metadata()[0]
        attended, lse = self.module.flash_mla_with_kvcache(
            q.unsqueeze(1), window.cache.unsqueeze(2), None, None, 512, schedules[shape], None,
            q.shape[2] ** -0.5 if scale is None else scale, False, True,
            _in_steps(window.indices).unsqueeze(1), **more,
        )  # fmt: skip
        attended = attended.squeeze(1)[:, :heads]
        return (attended if out is None else out.copy_(attended)), lse


def padded_heads(q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad queries [..., H, D] and sinks to a number of heads that FlashMLA takes."""
    more = -q.shape[-2] % _HEADS
    if not more:
        return q, sink
    q = torch.nn.functional.pad(q, (0, 0, 0, more))
    if sink is not None:
        sink = torch.nn.functional.pad(sink, (0, more), value=-torch.inf)
    return q, sink


def _in_steps(indices: Tensor) -> Tensor:
    """Pad lists to a width that FlashMLA takes."""
    short = -indices.shape[-1] % _LIST_STEP
    return torch.nn.functional.pad(indices, (0, short), value=-1) if short else indices


def _first(function: Callable[..., tuple[Tensor, ...]], *args: Any, **keywords: Any) -> Tensor:
    return function(*args, **keywords)[0]
