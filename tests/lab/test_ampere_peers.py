"""Engines for Ampere beside this package: what reaches them, and what a row says.

Stand-ins have the parameters of the repositories' functions and compute by this package's
operations; modules are imported from folders that look like checkouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types

import pytest
import torch

from anymla.bench.runner import run
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_rows
from anymla.ops.device import CPU, TARGETS
from lab.cases import ampere_attention as family
from lab.cases import sparse_attention as shared
from lab.cases.sparse_attention import Decode
from lab.peers import ampere
from lab.peers.ampere import A100Sglang, MiniSglang, VllmFork

FORK_FILE = "deepseek-v4-flash-0731-sm80/vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
SHAPE = Decode(3, 1, 8, 64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shared, "_WINDOW_SLOTS", 512)
    monkeypatch.setattr(shared, "_EXTRA_SLOTS", 512)
    monkeypatch.setattr(shared, "_MOST_LISTS", 2)


@dataclasses.dataclass
class Fork:
    """The fork's two functions.

    Attributes:
        ratios: ratios of compression that it was called with.
    """

    ratios: list[int] = dataclasses.field(default_factory=list)

    def build_ragged_indices_from_dense(
        self, indices, lengths, num_rows=-1, indices_out=None, indptr_out=None
    ):
        assert (indices.ndim, lengths.shape) == (2, indices.shape[:1])
        flat = torch.cat([row[:count] for row, count in zip(indices, lengths, strict=True)])
        return flat, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()

    def rocm_sparse_attn_decode(
        self, q, kv_cache, swa_k_cache, swa_only, topk_indices, topk_lens, swa_indices, swa_lens,
        swa_ragged_indices, swa_ragged_indptr, topk_ragged_indices, topk_ragged_indptr, attn_sink,
        scale, head_dim, nope_head_dim, rope_head_dim, output, group_size=0, compress_ratio=0,
    ):  # fmt: skip
        assert not swa_only
        assert head_dim == nope_head_dim + rope_head_dim == 512
        assert (kv_cache.dtype, swa_k_cache.dtype) == (torch.uint8, torch.uint8)
        self.ratios.append(compress_ratio)

        def dense(cache, flat, starts):
            rows = [flat[a:b] for a, b in itertools.pairwise(starts)]
            lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
            return CacheRows(cache, MAIN_FP8, torch.stack(rows), lengths)

        sparse_attention(
            q,
            [
                dense(swa_k_cache, swa_ragged_indices, swa_ragged_indptr),
                dense(kv_cache, topk_ragged_indices, topk_ragged_indptr),
            ],
            sink=attn_sink, scale=scale, out=output, backend="torch",
        )  # fmt: skip


def splitk(
    q, swa_cache, swa_indices, swa_lengths, *, compressed_cache=None, compressed_indices=None,
    compressed_lengths=None, softmax_scale, attn_sink,
):  # fmt: skip
    """Mini-SGLang's function, whose caches are flat."""
    for cache in (swa_cache, compressed_cache):
        assert (cache.shape, cache.dtype) == ((512, 512), torch.bfloat16)
    assert swa_lengths.tolist() == [swa_indices.shape[1]] * len(q)
    assert compressed_lengths.tolist() == [compressed_indices.shape[1]] * len(q)
    both = torch.cat((swa_indices, compressed_indices + len(swa_cache)), dim=1)
    rows = torch.cat((swa_cache, compressed_cache))
    return sparse_attention_rows(
        q, rows, both, sink=attn_sink, scale=softmax_scale, backend="torch"
    )[0]


class Tuned:
    """The patch's kernel below Triton's autotuner, and its function.

    Attributes:
        do_bench: function by which a tile is timed.
        cache: chosen tiles.
        launched: number of launches.
    """

    def __init__(self) -> None:
        self.do_bench = None
        self.cache: dict[str, int] = {}
        self.launched = 0

    def attend(
        self, q, primary_buffer, primary_indices, primary_lengths, extra_buffer, extra_indices,
        extra_lengths, sm_scale, attn_sink=None, output=None, lse=None,
    ):  # fmt: skip
        if "tile" not in self.cache:
            times = [self.do_bench(self.launch, quantiles=(0.5, 0.2, 0.8)) for _ in range(3)]
            self.cache["tile"] = times.index(min(times))
        output.copy_(
            splitk(
                q, primary_buffer, primary_indices, primary_lengths, softmax_scale=sm_scale,
                compressed_cache=extra_buffer, compressed_indices=extra_indices,
                compressed_lengths=extra_lengths, attn_sink=attn_sink,
            )
        )  # fmt: skip
        return output, lse.zero_()

    def launch(self):
        self.launched += 1


def a100_sglang(tuned):
    return A100Sglang(
        lambda _: types.SimpleNamespace(
            direct_dual_sparse_attention=tuned.attend, _direct_dual_sparse_attention_kernel=tuned
        )
    )


def fork(module):
    return VllmFork(lambda _: module)


def mini_sglang():
    return MiniSglang(lambda _: types.SimpleNamespace(sparse_attention_splitk_bf16=splitk))


@pytest.mark.parametrize(("times", "met"), [((16, 30, 20), True), ((30, 20, 14), False)])
def test_all_are_right_and_the_fastest_peer_counts(times, met, scripted, monkeypatch):
    monkeypatch.setattr(ampere, "_shortly_timed", ampere._only_called)
    peers = [fork(Fork()), mini_sglang(), a100_sglang(Tuned())]
    (result,) = run(family.ampere_cases([SHAPE], peers, "torch"), scripted(10, 12, *times))
    values = result.values
    for name in ("", "bf16_", "vllm_fork_", "mini_sglang_", "a100_sglang_"):
        assert values[f"{name}error"] < 3e-3
    assert (values["us"], values["bf16_us"]) == (10, 12)
    assert tuple(values[f"{peer.name}_us"] for peer in peers) == times
    assert [values[f"{peer.name}_rows"] for peer in peers] == ["FP8", "bfloat16", "bfloat16"]
    assert (values["ratio"], result.met) == (min(times) / 10, met)
    assert values.items() >= SHAPE.fields.items()
    assert (result.part, result.case) == (family.PART, SHAPE.label)


def test_bfloat16_rows_are_timed_beside_a_peer_that_has_them(clock):
    (result,) = run(family.ampere_cases([SHAPE], [fork(Fork())], "torch"), clock)
    assert not {"bf16_us", "mini_sglang_us"} & set(result.values)


@pytest.mark.parametrize(
    ("target", "ratio"), [(TARGETS["sm_80"], 4), (TARGETS["sm_86"], 128), (CPU, 128)]
)
def test_the_forks_tile_is_one_that_fits(target, ratio, monkeypatch):
    monkeypatch.setattr(ampere, "target_of", lambda _: target)
    module = Fork()
    inputs = shared.DecodeInputs.draw(SHAPE, torch.device("cpu"))
    fork(module).decode(inputs)[0]()
    assert module.ratios == [ratio]


def test_decoded_rows_are_those_of_both_caches():
    inputs = shared.DecodeInputs.draw(SHAPE, torch.device("cpu"))
    rows, count = inputs.decoded_caches
    assert (rows.shape, rows.dtype, count) == ((1024, 512), torch.bfloat16, 512)
    # bfloat16 loses nothing of the FP8 rows.
    slots = torch.tensor([0, 5, 511])
    assert torch.equal(rows[slots].double(), inputs._decoded(inputs.cache, slots, MAIN_FP8))
    more = inputs._decoded(inputs.extra_cache, slots, MAIN_FP8)
    assert torch.equal(rows[count + slots].double(), more)


@pytest.mark.parametrize("compiles", [True, False])
def test_all_kernels_are_compiled_before_they_are_timed(compiles, monkeypatch):
    """Those of every tile, and no tile is chosen by launches that ran nothing."""
    own = []
    monkeypatch.setattr(family, "_own_calls", lambda *_: {"": [lambda: own.append(1)]})
    monkeypatch.setattr(family, "compiled_together", lambda: contextlib.nullcontext(compiles))
    module, tuned = Fork(), Tuned()
    shapes = [SHAPE, Decode(1, 1, 16, 64)]
    peers = [fork(module), a100_sglang(tuned)]
    family.compile_ahead(shapes, peers, torch.device("cpu"))
    count = len(shapes) if compiles else 0
    assert (len(own), len(module.ratios), tuned.launched) == (count, count, 3 * count)
    assert not tuned.cache


def test_shapes_are_of_shards_and_whole_models():
    every = list(family.shapes())
    assert len(set(every)) == len(every)
    assert {shape.heads for shape in every} == {8, 16, 64, 128}
    assert {shape.extra for shape in every} == {512, 1024}
    assert {shape.batch for shape in every} == {1, 8, 32, 64, 128, 256}
    assert set(shared.portable_shapes()) <= set(every)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.usefixtures("no_vllm")
def test_the_forks_kernels_are_imported_without_its_engine(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    file = tmp_path / FORK_FILE
    write(
        file,
        "import vllm.envs as envs\n"
        "from vllm.compilation.breakable_cudagraph import eager_break_during_capture\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata\n"
        "from vllm.v1.attention.ops.fp8_sm80 import table\n"
        "@eager_break_during_capture\n"
        "def here(): return envs.FLAG, table, current_platform.supports_fp8()\n",
    )
    write(file.with_name("fp8_sm80.py"), "table = 256\n")
    write(file.parents[3] / "envs.py", "FLAG = True\n")
    write(file.parents[3] / "__init__.py", "import what_is_not_there\n")
    write(file.with_name("VERSION"), "26503f9\n")
    monkeypatch.setenv("ANYMLA_PEERS", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    peer = VllmFork()
    assert peer.available()
    assert peer.module.here() == (True, 256, False)
    assert str(peer.version()).startswith("26503f9, rocm_aiter_mla_sparse.py sha256 ")


def test_a_file_of_a_checkout_is_a_module(tmp_path, monkeypatch):
    file = tmp_path / MiniSglang.modules[0]
    write(file, "answer = 42\n")
    monkeypatch.setenv("ANYMLA_PEERS", str(tmp_path))
    peer = MiniSglang()
    assert peer.module.answer == 42
    assert str(peer.version()).startswith("deepseek_v4.py sha256 ")


@pytest.mark.parametrize("kind", [VllmFork, MiniSglang, A100Sglang])
def test_a_folder_without_an_engine_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("ANYMLA_PEERS", str(tmp_path))
    support = kind().available()
    assert not support
    assert f"in {tmp_path}" in support.reason
