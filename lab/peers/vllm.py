"""vLLM: its top-k kernels, and its path of decode attention for Intel XPU."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab.peers import Peer

if TYPE_CHECKING:
    from anymla.ops.indexer.shapes import SelectShape
    from lab.cases.sparse_attention import DecodeInputs

_WORKSPACE = 1 << 20
# Takes scores and their lengths.
Select = Callable[[Tensor, Tensor], object]


class VllmXpu(Peer):
    """Portable Triton that gathers every listed row into bfloat16 and attends to it there."""

    name, title = "vllm_xpu", "vLLM's path for XPU"
    modules = ("vllm.models.deepseek_v4.xpu.xpu_sparse_decode_fp8", "xpu_sparse_decode_fp8")

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of vLLM's path for XPU, one for each set of lists."""
        q = inputs.q.flatten(0, 1)
        out = torch.empty_like(q)
        repeat = functools.partial(torch.repeat_interleave, repeats=inputs.shape.rows)
        assert inputs.lengths is not None
        assert inputs.extra_lengths is not None
        call = functools.partial(
            self.module.xpu_sparse_decode_fp8,
            q=q,
            kv_cache=inputs.extra_cache,
            swa_kv_cache=inputs.cache,
            swa_only=False,
            topk_lens=repeat(inputs.extra_lengths),
            swa_lens=repeat(inputs.lengths),
            attn_sink=inputs.sink,
            softmax_scale=512**-0.5,
            head_dim=512,
            nope_head_dim=448,
            rope_head_dim=64,
            out=out,
        )

        def attend(window: Tensor, entries: Tensor) -> Tensor:
            call(topk_indices=entries, swa_indices=window)
            return out

        return [
            functools.partial(attend, window.flatten(0, 1)[:, None], entries.flatten(0, 1)[:, None])
            for window, entries in inputs.lists
            if entries is not None
        ]


class UnpackedVllmXpu(VllmXpu):
    """The same of a vLLM that lies in a folder, and need not be able to run here.

    Its kernels need Triton alone, the package much more. So its packages are entered without what
    they do when they are imported, and ``vllm.triton_utils`` has Triton and two constants. The
    process has no other vLLM from then on.
    """

    def __init__(self, folder: Path) -> None:
        """Import nothing yet.

        Args:
            folder: folder that contains ``vllm``, as a wheel unpacks.
        """
        super().__init__(functools.partial(_import_unpacked, folder))
        self._folder = folder

    def version(self) -> str | None:
        """Return the version in the metadata beside the package; None if there are none."""
        found = metadata.distributions(name="vllm", path=[str(self._folder)])
        return next((each.version for each in found), None)


def _import_unpacked(folder: Path, name: str) -> Any:
    enter_packages(
        folder,
        ("vllm", "vllm.models", "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.xpu",
         "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"),
    )  # fmt: skip
    return importlib.import_module(name)


def enter_packages(folder: Path, packages: Iterable[str]) -> None:
    """Make packages of an unpacked vLLM known to Python without executing them.

    Args:
        folder: folder that contains ``vllm``, as a wheel unpacks.
        packages: names of the packages, each after the one that it lies in.

    Raises:
        ImportError: the folder has no folder ``vllm``, or Triton is not installed.
    """
    if not (folder / "vllm").is_dir():
        raise ImportError(f"{folder} has no folder vllm")
    import triton
    import triton.language as tl

    for package in packages:
        module = types.ModuleType(package)
        module.__path__ = [str(folder.joinpath(*package.split(".")))]
        sys.modules[package] = module
    utilities: Any = types.ModuleType("vllm.triton_utils")
    utilities.tl, utilities.triton = tl, triton
    utilities.LOG2E, utilities.LOGE2 = math.log2(math.e), math.log(2)
    sys.modules["vllm.triton_utils"] = utilities


class VllmTopk:
    """The selectors of vLLM's compiled library."""

    def __init__(self, library: Path) -> None:
        """Load it.

        Args:
            library: path of the shared library.

        Raises:
            OSError: if the library cannot be loaded.
        """
        torch.ops.load_library(library)

    def selectors(self, shape: SelectShape, k: int, device: torch.device) -> dict[str, Select]:
        """Return vLLM's selections by name; not every one takes every shape."""
        ops = torch.ops._C
        out = torch.empty(shape.rows, k, dtype=torch.int32, device=device)
        workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        starts = torch.zeros(shape.rows, dtype=torch.int32, device=device)

        def by_row(logits: Tensor, lengths: Tensor) -> None:
            ops.top_k_per_row_prefill(logits, starts, lengths, out, shape.rows, *logits.stride(), k)

        def persistent(logits: Tensor, lengths: Tensor) -> None:
            lengths = lengths.view(shape.requests, -1) if not shape.prefill else lengths
            ops.persistent_topk(logits, lengths, out, workspace, k, shape.keys)

        return {"top_k_per_row_prefill": by_row, "persistent_topk": persistent}
