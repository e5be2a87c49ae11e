"""sgl-flash-mla: the newest FlashMLA for Hopper, by the operations of its library for older GPUs.

FlashMLA's release of 30 September 2026 left out Hopper and the rows of DeepSeek-V3.2 and V4; this
fork ships the kernels before it in a library of their own, whose operations belong to no module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.peers import find_file, library_version, operations
from lab.peers.flash_mla import FlashMla

# Name in a folder of peers, and in the unpacked wheel.
_LIBRARY = "sgl_flash_mla.abi3.so", "flash_mla/_C_legacy.abi3.so"


class SglFlashMla(FlashMla):
    """The operations of the fork's library, called as FlashMLA's functions."""

    name, title = "sgl_flash_mla", "sgl-flash-mla"
    modules = ("torch.ops.flash_mla_legacy",)

    def __init__(self, find: Callable[[str], Any] | None = None) -> None:
        """Import nothing yet.

        Args:
            find: returns the functions; None for those of the library in a folder of peers.
        """
        super().__init__(find or _load)

    def version(self) -> str | None:
        """Return the version beside the library's file, and a digest that identifies the file."""
        library = getattr(self.module, "library", None)
        return None if library is None else library_version(library)


class Functions:
    """FlashMLA's functions, as far as they are timed, by the library's operations.

    Attributes:
        library: file of the library.
    """

    def __init__(self, found: Any, library: Path) -> None:
        """Keep the operations.

        Args:
            found: namespace of the operations.
            library: file that they were loaded from.
        """
        self._operations = found
        self.library = library

    def get_mla_metadata(self) -> tuple[dict[str, Tensor | None], None]:
        """Return a schedule that the first call of a shape fills."""
        return {"schedule": None, "splits": None}, None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        plan: dict[str, Tensor | None],
        num_splits: None,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool,
        indices: Tensor,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decode over one or two caches; the format of a cache follows from its width."""
        assert is_fp8_kvcache
        assert not causal
        out, lse, plan["schedule"], plan["splits"] = self._operations.sparse_decode_fwd(
            q, k_cache, indices, topk_length, attn_sink, plan["schedule"], plan["splits"],
            extra_k_cache, extra_indices_in_kvcache, extra_topk_length, head_dim_v, softmax_scale,
            None,
        )  # fmt: skip
        return out, lse

    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: Tensor | None,
        topk_length: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to listed rows, with largest scores and lse as natural logarithms."""
        out, peaks, lse = self._operations.sparse_prefill_fwd(
            q, kv, indices, sm_scale, d_v, attn_sink, topk_length, False, True
        )
        return out, peaks, lse


@functools.cache
def _load(_: str) -> Functions:
    library = find_file(*_LIBRARY)
    torch.ops.load_library(library)
    return Functions(operations("flash_mla_legacy", "sparse_decode_fwd"), library)
