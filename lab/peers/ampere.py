"""Decode attention of public engines for Ampere, by their repositories' own files.

A folder that ``ANYMLA_PEERS`` names contains a checkout of a repository, or the files below in
their places. All of their kernels are Triton, so that ``crossrun.ptx`` executes them as sm_80.
Their lists are made ready beforehand, which an engine does once a step or while it selects.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.ops.device import target_of
from lab.peers import Peer, find_file, library_version
from lab.peers.vllm import enter_packages

if TYPE_CHECKING:
    from lab.cases.sparse_attention import DecodeInputs

# The ratio of compression by which the fork chooses its tile: 64 rows of ratio-4 layers, whose
# entries are selected, and 32 of others. Tiles of 64 rows need so much shared memory of a CTA.
_RATIOS, _WIDE_TILE_BYTES = (4, 128), 157_696


class AmpereEngine(Peer):
    """An engine's function of decode attention over a window and the entries of a second cache.

    Attributes:
        cached: format of the cached rows: "FP8" for V4's 584 bytes, "bfloat16" for 1,024 bytes.
    """

    cached: str

    def __init__(self, find: Callable[[str], Any] | None = None) -> None:
        """Import nothing yet.

        Args:
            find: returns the module; None for the one in a folder of peers.
        """
        super().__init__(find or self.import_here)

    def import_here(self, name: str) -> Any:
        """Return the module of a name, from a folder of peers."""
        return _module_of_file(name)

    def version(self) -> str | None:
        """Return the commit in the file VERSION beside the module, and a digest of the module."""
        file = getattr(self.module, "__file__", None)
        return None if file is None else library_version(Path(file))

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of the engine's decode, one for each set of lists."""
        raise NotImplementedError

    def compile(self, inputs: DecodeInputs) -> None:
        """Launch whatever kernel ``decode`` may launch, where launches only compile."""
        self.decode(inputs)[0]()


class VllmFork(AmpereEngine):
    """vLLM's fork for sm_80 (yunyinbanfu/deepseek-v4-flash-0731-sm80, written for 26503f9).

    Its kernel reads V4's FP8 rows, whose codes it looks up in a table where Triton has no
    instruction for them, and splits lists by the number of SMs. Its tile of selected entries has 64
    rows; 32 are timed where a CTA's shared memory is too small for these, as sm_86's is.
    """

    name, title = "vllm_fork", "deepseek-v4-flash-0731-sm80"
    modules = ("vllm.v1.attention.ops.rocm_aiter_mla_sparse",)
    cached = "FP8"

    def import_here(self, name: str) -> Any:
        """Return the module of a name, from a folder of peers, without the engine around it."""
        return _fork(name)

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of the fork's decode, one for each set of lists."""
        q = inputs.q.flatten(0, 1)
        out = torch.empty_like(q)
        wide, narrow = _RATIOS
        fits = target_of(q.device).shared_bytes >= _WIDE_TILE_BYTES
        ragged = self.module.build_ragged_indices_from_dense
        calls: list[Callable[[], Tensor]] = []
        for lists in inputs.lists:
            window, entries = inputs.cache_rows(*lists)
            slots, starts = ragged(window.indices, window.lengths)
            more_slots, more_starts = ragged(entries.indices, entries.lengths)
            attend = functools.partial(
                self.module.rocm_sparse_attn_decode,
                q=q, kv_cache=entries.cache, swa_k_cache=window.cache, swa_only=False,
                topk_indices=None, topk_lens=None,
                swa_indices=window.indices, swa_lens=window.lengths,
                swa_ragged_indices=slots, swa_ragged_indptr=starts,
                topk_ragged_indices=more_slots, topk_ragged_indptr=more_starts,
                attn_sink=inputs.sink, scale=512**-0.5, head_dim=512, nope_head_dim=448,
                rope_head_dim=64, output=out, compress_ratio=wide if fits else narrow,
            )  # fmt: skip
            calls.append(functools.partial(_then, attend, out))
        return calls


class MiniSglang(AmpereEngine):
    """Mini-SGLang's fork for eight A100 (wxwxwwxxx/deepseek-v4-sm80, written for be3bca0).

    Its decode copies every listed row of both caches, which are bfloat16, to one tensor, attends to
    that in 16 splits, and combines them.
    """

    name, title = "mini_sglang", "deepseek-v4-sm80"
    modules = ("deepseek-v4-sm80/python/minisgl/kernel/triton/deepseek_v4.py",)
    cached = "bfloat16"

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of the engine's decode, one for each set of lists."""
        q = inputs.q.flatten(0, 1)
        rows, count = inputs.decoded_caches
        calls: list[Callable[[], Tensor]] = []
        for lists in inputs.lists:
            window, entries = inputs.cache_rows(*lists)
            calls.append(
                functools.partial(
                    self.module.sparse_attention_splitk_bf16,
                    q, rows[:count], window.indices, window.lengths,
                    compressed_cache=rows[count:], compressed_indices=entries.indices,
                    compressed_lengths=entries.lengths,
                    softmax_scale=512**-0.5, attn_sink=inputs.sink,
                )
            )  # fmt: skip
        return calls


class A100Sglang(AmpereEngine):
    """A patch of SGLang for A100 (Qeeweew/deepseek-v4-a100-sglang, written for d3987e7).

    Its kernel reads listed rows of two bfloat16 caches, without splits. Triton's autotuner chooses
    among 12 tiles for each shape; it times each for some milliseconds here, by default for 125.
    """

    name, title = "a100_sglang", "deepseek-v4-a100-sglang"
    modules = ("deepseek-v4-a100-sglang/dsv4_a100_patch/triton_kernels/attention.py",)
    cached = "bfloat16"

    def decode(self, inputs: DecodeInputs) -> list[Callable[[], Tensor]]:
        """Make calls of the patch's attention, one for each set of lists."""
        self._tuned.do_bench = _shortly_timed
        q = inputs.q.flatten(0, 1)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        rows, count = inputs.decoded_caches
        calls: list[Callable[[], Tensor]] = []
        for lists in inputs.lists:
            window, entries = inputs.cache_rows(*lists)
            attend = functools.partial(
                self.module.direct_dual_sparse_attention,
                q, rows[:count], window.indices, window.lengths,
                rows[count:], entries.indices, entries.lengths,
                512**-0.5, attn_sink=inputs.sink, output=out, lse=lse,
            )  # fmt: skip
            calls.append(functools.partial(_then, attend, out))
        return calls

    def compile(self, inputs: DecodeInputs) -> None:
        """Launch the kernel in every tile, and forget which one seemed to be the fastest."""
        (call, *_) = self.decode(inputs)
        self._tuned.do_bench = _only_called
        call()
        self._tuned.cache.clear()

    @property
    def _tuned(self) -> Any:
        return self.module._direct_dual_sparse_attention_kernel


def ampere_engines() -> list[AmpereEngine]:
    """Return all of them, whether they are here or not."""
    return [VllmFork(), MiniSglang(), A100Sglang()]


def _shortly_timed(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=2, rep=8, quantiles=quantiles)


def _only_called(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    call()
    return [0.0] * len(quantiles)


def _then(call: Callable[[], object], out: Tensor) -> Tensor:
    call()
    return out


def _module_of_file(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(name).stem, find_file(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fork(name: str) -> Any:
    """Import a module of the fork without the engine around it; the process has no other vLLM."""
    inside = Path(VllmFork.title)
    file = find_file(str(inside.joinpath(*name.split(".")).with_suffix(".py")))
    folder = file.parents[len(name.split(".")) - 1]
    enter_packages(folder, ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"))
    for unused in (
        "compilation.breakable_cudagraph", "forward_context", "utils.mem_utils",
        "utils.torch_utils", "v1.attention.backends.mla.indexer", "v1.attention.ops.common",
        "v1.worker.workspace",
    ):  # fmt: skip
        sys.modules[f"vllm.{unused}"] = _Unused(f"vllm.{unused}")
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(
        is_rocm=lambda: False,
        is_cuda=lambda: True,
        is_fp8_fnuz=lambda: False,
        supports_fp8=lambda: torch.cuda.get_device_capability() >= (8, 9),
    )
    sys.modules["vllm.platforms"] = platforms
    return importlib.import_module(name)


class _Unused(types.ModuleType):
    """Module of the fork that decode attention does not call; a name in it decorates nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda given: given
