"""cuDNN frontend's gradients of sparse attention on Hopper (NVIDIA/cudnn-frontend)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anymla.ops.attention.composed import named_rows
from anymla.testing.conformance.adapters import Adapter, require_module
from anymla.testing.conformance.registry import NotApplicable

_MODULE = "cudnn.deepseek_sparse_attention"
_HEADS, _COLUMNS = (64, 128), 64

_TRANSLATES = (
    "both ranges become one list of rows for each query; numbers outside the rows become -1",
    "heads are padded to 64 or 128 (sink -inf, gradient 0), and cut off again",
    "lists are padded to a multiple of 64 columns with -1",
    "no sink becomes one of -inf",
)
_EXCUSED = {"T5": "has no deterministic gradients on Hopper"}


def adapter() -> Adapter:
    """Return the adapter of the installed cuDNN frontend."""
    return adapter_of(require_module(_MODULE, "cudnn_frontend"), "cudnn_frontend")


def adapter_of(module: Any, name: str, *, needs_gpu: bool = True) -> Adapter:
    """Return an adapter of a module with ``sparse_attention_backward_wrapper``."""
    return Adapter(
        name,
        {"prefill_attention_backward": functools.partial(_gradients, module)},
        version=str(getattr(module, "__version__", "")),
        translates=_TRANSLATES,
        excused=_EXCUSED,
        needs_gpu=needs_gpu,
    )


def _gradients(
    module: Any,
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype != torch.bfloat16:
        raise NotApplicable(f"takes bfloat16 queries, not {q.dtype}")
    asked = [
        name
        for name, value in rest.items()
        if isinstance(value, Tensor) or value not in (None, False, "all")
    ]
    if asked or out is None:
        raise NotApplicable(f"takes no {', '.join(asked) or 'delta in place of the output'}")
    heads = q.shape[1]
    missing = next((size for size in _HEADS if size >= heads), heads) - heads
    dout, q, out = (pad(each, (0, 0, 0, missing)).contiguous() for each in (dout, q, out))
    lse = pad(lse, (0, missing)).contiguous()
    sink = lse.new_full((heads,), -torch.inf) if sink is None else sink.float()
    index, used = named_rows(ranges, lists, window, entries)
    column = torch.arange(index.shape[1], device=index.device)
    known = (index >= 0) & (index < len(rows)) & (column < used.unsqueeze(1))
    listed = pad(torch.where(known, index, -1), (0, -index.shape[1] % _COLUMNS), value=-1)
    found = module.sparse_attention_backward_wrapper(
        q, rows.contiguous(), out, dout, lse, pad(sink, (0, missing), value=-torch.inf),
        listed.contiguous(), softmax_scale=q.shape[2] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return found["dq"][:, :heads], found["dkv"].float(), found["d_sink"][:heads]
