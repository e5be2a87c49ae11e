"""Peers at their newest: what reaches them fits the signatures of their wheels.

Stand-ins have the wheels' parameters (sgl-flash-mla 1.0.0, sgl-deep-gemm 0.2.5, cuDNN frontend
1.32.0, humming-kernels 0.1.20) and compute by this package's operations.
"""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch
from torch import Tensor

from anymla.bench.cpu_clock import CpuClock
from anymla.bench.runner import run
from anymla.cli.bad_input import BadInput
from anymla.compat import flash_mla
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.attention import prefill_attention_backward, sparse_attention_rows
from anymla.ops.indexer import paged_mqa_logits
from anymla.ops.indexer.shapes import SelectShape
from anymla.ops.registry import BackendUnavailable, Support
from anymla.testing.tolerance import relative_l2
from lab import backward_tiles, peers
from lab.cases import indexer, prefill_attention, sparse_attention
from lab.cases.prefill_attention import ListedRows, PrefillCase, prefill_peers
from lab.cases.sparse_attention import Decode
from lab.page.headline import comparisons
from lab.page.peers import decode_by_heads
from lab.page.reading import flash_mla_us
from lab.peers import present_peers
from lab.peers.cudnn import CudnnFrontend
from lab.peers.deep_gemm import DeepGemm
from lab.peers.flash_mla import FlashMla
from lab.peers.humming import Humming
from lab.peers.sgl_flash_mla import Functions, SglFlashMla


def absent(name: str) -> None:
    raise ImportError(f"No module named {name!r}")


# sgl-flash-mla -----------------------------------------------------------------------------------


@dataclasses.dataclass
class LegacyOperations:
    """``torch.ops.flash_mla_legacy``: the schemas of 1.0.0, whose arguments are all positional."""

    schedules: list[Tensor | None] = dataclasses.field(default_factory=list)

    def sparse_decode_fwd(
        self, q, kv, indices, topk_length, attn_sink, tile_scheduler_metadata, num_splits,
        extra_kv, extra_indices, extra_topk_length, d_v, sm_scale, kv_format, /,
    ):  # fmt: skip
        assert (q.ndim, kv.ndim, indices.ndim) == (4, 4, 3)
        assert q.shape[2] in (64, 128)
        assert (q.dtype, indices.dtype, d_v) == (torch.bfloat16, torch.int32, 512)
        assert kv.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn)
        assert kv_format is None
        for lengths in (topk_length, extra_topk_length):
            assert lengths is None or (lengths.shape, lengths.dtype) == (q.shape[:1], torch.int32)
        assert indices.shape[2] % 64 == 0
        if extra_kv is not None:
            assert extra_indices.shape[:2] == q.shape[:2]
            assert extra_indices.shape[2] % 64 == 0
        self.schedules.append(tile_scheduler_metadata)
        assert (tile_scheduler_metadata is None) == (num_splits is None)
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, kv, None, None, d_v, flash_mla.get_mla_metadata()[0], None, sm_scale, False, True,
            indices, attn_sink, extra_kv, extra_indices, topk_length, extra_topk_length,
        )  # fmt: skip
        return out, lse, torch.zeros(1, 8), torch.zeros(2)

    def sparse_prefill_fwd(
        self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, return_log2_stats,
        return_stats, /,
    ):  # fmt: skip
        assert (q.ndim, kv.ndim, indices.ndim, d_v) == (3, 3, 3, 512)
        assert kv.shape[1] == indices.shape[1] == 1
        assert topk_length.shape == q.shape[:1]
        assert (return_log2_stats, return_stats) == (False, True)
        out, lse = sparse_attention_rows(
            q, kv, indices, topk_length, sink=attn_sink, scale=sm_scale, backend="torch"
        )
        return [out, lse, lse]


def both(found: LegacyOperations | None = None) -> list[FlashMla]:
    made = Functions(found or LegacyOperations(), None)
    return [FlashMla(lambda _: flash_mla), SglFlashMla(lambda _: made)]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sparse_attention, "_WINDOW_SLOTS", 512)
    monkeypatch.setattr(sparse_attention, "_EXTRA_SLOTS", 512)
    monkeypatch.setattr(sparse_attention, "_MOST_LISTS", 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "shape",
    [
        Decode(2, 2, 16, 64, ragged=True),
        Decode(1, 2, 64, 0, lengths=False, width=64, v32=True),
    ],
)
def test_decode_is_beside_both_builds_and_the_ratio_is_to_the_faster(shape, scripted):
    found = LegacyOperations()
    (result,) = run(
        sparse_attention.decode_cases([shape], "torch", both(found)), scripted(10, 14, 12)
    )
    values = result.values
    assert (values["flash_mla_microseconds"], values["sgl_flash_mla_microseconds"]) == (14, 12)
    assert values["ratio"] == pytest.approx(1.2)
    assert values["sgl_flash_mla_error"] < 3e-3
    # The first call makes the schedule, as in FlashMLA, and later ones follow it.
    assert found.schedules[0] is None
    assert all(each is not None for each in found.schedules[1:])


def test_prefill_is_beside_both_builds(scripted):
    peers_of = prefill_peers(both())
    assert list(peers_of) == ["peer", "sgl_flash_mla"]
    case = PrefillCase("selected", 12, 2, 600, 64)
    (result,) = run(
        prefill_attention.cases([case], "torch", peers_of), scripted(10, 3, 11, 4, 15, 13)
    )
    assert (result.values["peer_us"], result.values["sgl_flash_mla_us"]) == (15, 13)
    assert result.values["ratio"] == pytest.approx(1.3)
    assert result.values["fp8_ratio"] == pytest.approx(17 / 11)
    assert result.values["sgl_flash_mla_error"] < 3e-3
    lists = [ListedRows(6, 64, 128, 500)]
    (result,) = run(prefill_attention.listed_cases(lists, "torch", peers_of), scripted(10, 13, 15))
    assert result.values["ratio"] == pytest.approx(1.3)


def test_pages_compare_with_the_faster_build():
    row = {
        "part": "decode attention beside FlashMLA", "case": "h64 b1 s_q1 128+512", "rows": 1,
        "batch": 1, "heads": 64, "extra": 512, "page": 64, "microseconds": 10.0, "device": "H200",
        "flash_mla_microseconds": 14.0, "sgl_flash_mla_microseconds": 12.0,
    }  # fmt: skip
    assert flash_mla_us(row) == 12.0
    assert decode_by_heads([row]).body == [["64", "10.0 (1.20)"]]
    (found,) = comparisons([row]).items()
    assert found[0] == ("Decode attention, one query", "sgl-flash-mla")
    assert list(found[1].values()) == [pytest.approx(1.2)]
    del row["sgl_flash_mla_microseconds"]
    assert flash_mla_us(row) == 14.0
    assert flash_mla_us({"microseconds": 1.0}) is None


# Folders -----------------------------------------------------------------------------------------


def test_a_library_lies_in_a_folder_that_the_environment_names(monkeypatch, tmp_path):
    (tmp_path / "b").mkdir()
    library = tmp_path / "b" / "sgl_flash_mla.abi3.so"
    monkeypatch.delenv("ANYMLA_PEERS", raising=False)
    reason = SglFlashMla().available().reason
    assert "sgl-flash-mla cannot be imported" in reason
    assert "no sgl_flash_mla.abi3.so or flash_mla/_C_legacy.abi3.so in ANYMLA_PEERS" in reason
    monkeypatch.setenv("ANYMLA_PEERS", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    with pytest.raises(BackendUnavailable, match=f"abi3.so in {tmp_path / 'a'}, {tmp_path / 'b'}"):
        _ = SglFlashMla().module
    library.write_bytes(b"no library")
    assert peers.find_file("x", library.name) == library
    assert "sgl-flash-mla cannot be imported" in SglFlashMla().available().reason
    # The bytes of the file stand for a version, beside the one that the wheel states.
    assert peers.library_version(library).startswith("sgl_flash_mla.abi3.so sha256 ")
    (tmp_path / "b" / "VERSION").write_text("1.0.0\n")
    assert peers.library_version(library).startswith("1.0.0, sgl_flash_mla.abi3.so sha256 ")
    made = SglFlashMla(lambda _: Functions(LegacyOperations(), library))
    assert made.version() == peers.library_version(library)


def test_an_unpacked_package_comes_before_an_installed_one(monkeypatch, tmp_path):
    inside = tmp_path / "nvidia_cutlass_dsl" / "dsl_packages"
    for folder, name in ((tmp_path, "anymla_peer_one"), (inside, "anymla_peer_two")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("__version__ = '3'\n")
    monkeypatch.setattr("sys.path", ["elsewhere"])
    monkeypatch.setenv("ANYMLA_PEERS", str(tmp_path))
    for name in ("anymla_peer_one", "anymla_peer_two"):
        assert peers.find_module(name).__version__ == "3"
    assert peers.sys.path == [str(tmp_path), str(inside), "elsewhere"]


def test_what_is_not_here_is_named_and_not_timed(capsys):
    here, gone = both()[0], SglFlashMla(absent)
    assert present_peers("--flash-mla", [here, gone]) == [here]
    assert "not timed: sgl-flash-mla cannot be imported" in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"--flash-mla: FlashMLA cannot .*; sgl-flash-mla cannot"):
        present_peers("--flash-mla", [FlashMla(absent), gone])


# sgl-deep-gemm -----------------------------------------------------------------------------------


class NewScores:
    """DeepGEMM's functions of scores since 2.8, which leave what is not visible as it comes."""

    __version__ = "0.2.5"

    def get_num_sms(self):
        return 1

    def get_paged_mqa_logits_metadata(self, context_lens, block_kv, num_sms, indices=None):
        assert context_lens.ndim == 2
        return context_lens

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        indices=None,
    ):  # fmt: skip
        assert q.ndim == kv_cache.ndim == 4
        assert kv_cache.shape[2] == 1
        assert schedule_meta is context_lens
        return paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, max_context=max_context_len,
            layout=INDEX_FP8, backend="torch",
        ).flatten(0, -2)  # fmt: skip

    def fp8_fp4_mqa_logits(
        self, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k,
        schedule_meta=None,
    ):  # fmt: skip
        keys = kv[0].float() * kv[1][:, None]
        assert max_seqlen_k == len(keys)
        assert (cu_seq_len_k_start == 0).all()
        scores = torch.einsum("thd,kd->thk", q.float(), keys).relu()
        return (scores * weights[:, :, None]).sum(1)


@pytest.mark.parametrize(
    "shape", [SelectShape(2, 2, 1024), SelectShape(1, 3, 1024, prefill=True)], ids=str
)
def test_scores_by_the_names_and_arguments_of_today(shape, monkeypatch):
    monkeypatch.setattr(indexer, "_POOL_BYTES", 1)
    pages = indexer.pages_needed([shape])
    (given, _) = indexer.Pool(pages, torch.device("cpu")).inputs(shape, 2)
    peer = DeepGemm(lambda _: NewScores())
    assert peer.version() == "0.2.5"
    logits = peer.scores(shape, given)(True)
    place = torch.arange(logits.shape[1])
    assert (logits.masked_fill(place < given.lengths.view(-1, 1), -math.inf) == -math.inf).all()
    assert logits[0, : int(given.lengths.flatten()[0])].isfinite().all()


# cuDNN frontend ----------------------------------------------------------------------------------


def backward(
    q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None,
    dkv=None, block_tile=64, deterministic=False, stream=None, workspace=None, q_cluster_mode="off",
):  # fmt: skip
    """``sparse_attention_backward_wrapper``: gradients over one list of rows of each query."""
    tokens, heads, _ = q.shape
    assert (kv.ndim, topk_idxs.ndim, topk_idxs.dtype) == (2, 2, torch.int32)
    assert topk_idxs.is_contiguous()
    assert (lse.shape, lse.dtype) == ((tokens, heads), torch.float32)
    assert (attn_sink.shape, attn_sink.dtype) == ((heads,), torch.float32)
    assert out.dtype == dout.dtype == q.dtype == torch.bfloat16
    ranges = torch.zeros(tokens, 4, dtype=torch.int32)
    ranges[:, 3] = topk_idxs.shape[1]
    found = prefill_attention_backward(
        dout, q, kv, ranges, topk_idxs, out, lse, window=0, entries=topk_idxs.shape[1],
        sink=attn_sink, scale=softmax_scale, backend="torch",
    )  # fmt: skip
    return dict(zip(("dq", "dkv", "d_sink"), found, strict=True))


@pytest.mark.parametrize("shape", [(2, 9, 0), (3, 0, 0), (2, 0, 7)])
def test_gradients_of_the_same_inputs(shape, monkeypatch):
    monkeypatch.setattr(backward_tiles, "ENTRIES", 40)
    monkeypatch.setattr(backward_tiles, "WINDOW", 8)
    package = types.SimpleNamespace(
        __version__="1.32.0", sparse_attention_backward_wrapper=backward
    )
    peer = CudnnFrontend(lambda _: package)
    assert peer.version() == "1.32.0"
    sized = backward_tiles.Shape(*shape, tokens=4)
    call = backward_tiles.Call(sized, torch.device("cpu"), channels=32)
    want = call.run("torch")
    for one, other in zip(peer.gradients(call)(), want, strict=True):
        assert relative_l2(one, other) < 1e-6
    fields = backward_tiles._beside(CpuClock(), peer.gradients(call), want)
    assert fields["cudnn_frontend_us"] > 0
    assert max(fields["cudnn_frontend_relative_l2"]) < 1e-6


# Humming -----------------------------------------------------------------------------------------


class Layer:
    """``HummingLayer`` of 0.1.20: the parameters of its constructor and of its calls."""

    seen: list[dict] = []  # noqa: RUF012

    def __init__(
        self, shape_n, shape_k, weight_config, input_config=None, pad_n_to_multiple=1,
        pad_k_to_multiple=1, num_experts=None, has_bias=False, torch_dtype=None,
    ):  # fmt: skip
        assert weight_config == {"quant_method": "mxfp4"}
        assert input_config["dtype"] == "float8e4m3"
        assert input_config["quant_mode"] in ("dynamic_token", "dynamic_group")
        assert torch_dtype == torch.bfloat16
        self.n, self.humming_config = shape_n, (shape_n, shape_k, num_experts)

    def load_from_tensors(self, tensors, prefix=""):
        n, k, experts = self.humming_config
        assert tensors["weight"].shape == (experts, n, k // 2)
        assert tensors["weight_scale"].shape == (experts, n, k // 32)

    def transform(self, allow_inplace=False):
        pass

    def __call__(
        self, inputs, outputs=None, input_scale=None, input_scale_2=None, sorted_ids=None,
        expert_ids=None, num_tokens_padded=None, expert_layout=None, top_k=1, valid_shape_m=0,
        compute_config=None, tuning_config=None, hadamard_block_size=None, use_pdl=None,
    ):  # fmt: skip
        self.seen.append({"top_k": top_k, "rows": valid_shape_m, "scale": input_scale is not None})
        assert (compute_config, tuning_config) == (
            '{"gemm_type": "indexed"}',
            '{"block_shape": [16]}',
        )
        return torch.ones(valid_shape_m, self.n, dtype=torch.bfloat16)


def may_process_input(
    config, inputs, *, outputs=None, group_scales=None, token_scales=None, activation_type="none",
    activation_impl=None, hadamard_block_size=None, layout="normal", expert_tokens=None,
    scatter_idx=None, num_valid_tokens=None, zero_invalid=False, m_major_scale=False, use_pdl=None,
):  # fmt: skip
    assert activation_type in ("none", "binary_split")
    return inputs, torch.ones(1), None


def get_heuristics_config(
    layer_config, shape_m=None, use_f16_accum=False, use_batch_invariant=False,
    use_m_major_input_scale=False, gemm_type="dense", device=None,
):  # fmt: skip
    assert gemm_type == "indexed"
    return [(0, 1 << 30, {"block_shape": [16]})]


def test_humming_is_called_by_the_parameters_of_its_newest(monkeypatch):
    module = types.SimpleNamespace(
        HummingLayer=Layer, may_process_input=may_process_input,
        get_heuristics_config=get_heuristics_config,
    )  # fmt: skip
    vllm = types.SimpleNamespace(
        available=lambda: Support(True), align=lambda ids, block, experts: (ids, ids, ids)
    )
    monkeypatch.setattr(Layer, "seen", [])
    peer = Humming(vllm, find=lambda _: module)
    count, inner, width = 4, 64, 128
    weights = {
        f"{kind}{part}": [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        for part, (n, k) in {"1": (inner, width), "3": (inner, width), "2": (width, inner)}.items()
        for kind, size in {"w": (n, k // 2), "s": (n, k // 32)}.items()
    }
    monkeypatch.setattr(
        "lab.peers.humming.kernels",
        lambda: types.SimpleNamespace(
            weighted_sum=lambda rows, routing: torch.einsum(
                "tkd,tk->td", rows.view(*routing.shape, -1).float(), routing
            )
        ),
    )
    call = peer.prepare(weights, 10.0)
    ids, routing = torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
    out = call(torch.zeros(5, width).bfloat16(), ids, routing)
    assert (out == 2).all()
    assert Layer.seen == [
        {"top_k": 2, "rows": 10, "scale": True}, {"top_k": 1, "rows": 10, "scale": True},
    ]  # fmt: skip
