"""The compressor's cache of partial windows: plain float32 rows, addressed by token position.

A row is ``[kv | score + ape]``, each ``width`` channels wide; a page holds a few tokens. Page
strides are padded to a multiple of 576 bytes so that state pages may share physical blocks with
KV pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 576


def state_page_stride_bytes(tokens: int, width: int) -> int:
    """Return the bytes from one state page of ``tokens`` tokens to the next, padding included."""
    return -(-tokens * 2 * width * 4 // _ALIGNMENT) * _ALIGNMENT


def allocate_states(
    pages: int, tokens: int, width: int, device: torch.device | str = "cpu", fill: int = 0
) -> Tensor:
    """Allocate float32 [pages, tokens, 2 * width]; ``fill`` is the value of every byte."""
    stride = state_page_stride_bytes(tokens, width)
    storage = torch.full((pages * stride,), fill, dtype=torch.uint8, device=device)
    return storage.view(torch.float32).as_strided(
        (pages, tokens, 2 * width), (stride // 4, 2 * width, 1)
    )
