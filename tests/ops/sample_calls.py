"""One small call of every operation: its arguments by name, in the order of its contract."""

import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, InverseRopeQuant
from anymla.testing.conformance.ops import all_operations

TOKENS = 2


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def cache_of(layout_id):
    layout = get_layout(layout_id)
    cache = layout.allocate(3, 4)
    layout.write(cache, torch.arange(12), torch.randn(12, layout.channels))
    return cache


def listed(indices, lengths):
    return CacheRows(cache_of(MAIN_FP8), MAIN_FP8, indices, lengths)


def table(rotated=64):
    angles = torch.rand(8, rotated // 2)
    return torch.cat((angles.cos(), angles.sin()), 1)


def _attention(heads=2, channels=512):
    return {
        "q": torch.randn(TOKENS, heads, channels),
        "rows": [listed(int32([0, 5, 7], [3, -1, 11]), int32(3, 2))],
    }


def _sites():
    return {
        "fn": torch.randn(8, 64) / 8,
        "base": torch.randn(8),
        "scale": torch.rand(3),
    }


def _prefill():
    return {
        "q": torch.randn(TOKENS, 2, 512),
        "rows": torch.randn(5, 512),
        "ranges": int32([0, 2, 2, 1], [1, 2, 2, 2]),
    }


def _gates():
    return {
        "u": torch.randn(TOKENS, 32),
        "h": torch.randn(TOKENS, 2, 32),
        "post": torch.rand(TOKENS, 2),
        "comb": torch.rand(TOKENS, 2, 2),
    }


def _eps(*names):
    return dict.fromkeys(("norm_eps", "hc_eps"), 1e-6) | dict.fromkeys(names, 3)


def _experts():
    shapes = {"w1": (8, 16), "w3": (8, 16), "w2": (16, 8)}
    weights = {name: [torch.randn(shape) for _ in range(3)] for name, shape in shapes.items()}
    return {
        "x": torch.randn(TOKENS, 16),
        "ids": int32([0, 2], [1, 2]),
        "weights": torch.rand(TOKENS, 2),
        **weights,
        "s1": [],
        "s3": [],
        "s2": [],
        "weight_format": "plain",
        "swiglu_limit": 7.0,
        "quantize_activations": False,
    }


def _scaled(quantise, width):
    names = ("weight", "scale", "global_scale")
    parts = quantise(torch.randn(128, width))
    return {"x": torch.randn(TOKENS, width), **dict(zip(names, parts, strict=False))}


_CALLS = {
    "save_partial_states": lambda: {
        "kv": torch.randn(TOKENS, 8),
        "score": torch.randn(TOKENS, 8),
        "ape": torch.randn(4, 8),
        "positions": int64(2, 3),
        "state_cache": torch.zeros(2, 4, 16),
        "slot_mapping": int64(2, 3),
        "compress_ratio": 4,
    },
    "compress_norm_rope_insert": lambda: {
        "state_cache": torch.randn(1, 4, 1024),
        "state_block_table": int32([0]),
        "state_slot_mapping": int64(2, 3),
        "token_to_req": int32(0, 0),
        "positions": int64(2, 3),
        "norm_weight": torch.rand(512),
        "eps": 1e-6,
        "cos_sin_cache": table(),
        "k_cache": cache_of(MAIN_FP8),
        "k_slot_mapping": int64(-1, 2),
        "compress_ratio": 4,
        "overlap": False,
        "layout": MAIN_FP8,
    },
    "compress_norm": lambda: {
        "state_cache": torch.randn(1, 4, 64),
        "state_block_table": int32([0]),
        "state_slot_mapping": int64(2, 3),
        "token_to_req": int32(0, 0),
        "positions": int64(2, 3),
        "norm_weight": torch.rand(32),
        "eps": 1e-6,
        "compress_ratio": 2,
        "overlap": False,
    },
    "best_logits": lambda: {
        "logits": torch.randn(TOKENS, 11),
        "x": torch.randn(TOKENS, 3),
        "weight": torch.randn(11, 3),
    },
    "engram_rows": lambda: {
        "out": torch.empty(TOKENS, 12),
        "codes": torch.zeros(TOKENS, 3, 4).byte(),
        "scales": torch.zeros(TOKENS, 3, 2).byte(),
    },
    "engram_gate": lambda: {
        "h": torch.randn(TOKENS, 2, 32),
        "projected": torch.randn(TOKENS, 96),
        "weight": torch.rand(2, 32),
        "eps": 1e-6,
    },
    "hc_gates": lambda: {"h": torch.randn(TOKENS, 2, 32), **_sites(), **_eps("iters")},
    "hc_collapse_norm": lambda: {
        "h": torch.randn(TOKENS, 2, 32),
        "pre": torch.rand(TOKENS, 2),
        "norm_weight": torch.rand(32),
        "norm_eps": 1e-6,
    },
    "hc_pre": lambda: {"h": torch.randn(TOKENS, 2, 32), **_sites(), **_eps("iters")},
    "hc_post": _gates,
    "hc_pre_backward": lambda: {
        "h": torch.randn(TOKENS, 2, 32),
        **_sites(),
        "dy": torch.randn(TOKENS, 32),
        "dpre": None,
        "dpost": torch.randn(TOKENS, 2),
        "dcomb": torch.randn(TOKENS, 2, 2),
        **_eps("iters"),
    },
    "hc_post_backward": lambda: {"dout": torch.randn(TOKENS, 2, 32), **_gates()},
    "hc_head": lambda: {
        "h": torch.randn(TOKENS, 2, 32),
        "fn": torch.randn(2, 64),
        "base": torch.randn(2),
        "scale": torch.rand(1),
        **_eps(),
    },
    "hc_post_pre_norm": lambda: (
        _gates() | _sites() | {"norm_weight": torch.rand(32), **_eps("iters")}
    ),
    "indexer_q_rope_quant": lambda: {
        "q": torch.randn(TOKENS, 2, 128),
        "weights": torch.rand(TOKENS, 2),
        "positions": int64(3, 4),
        "cos_sin_cache": table(),
        "softmax_scale": 0.5,
        "head_scale": 0.25,
    },
    "select_topk": lambda: {
        "q": torch.randn(TOKENS, 2, 128),
        "index_cache": cache_of(INDEX_FP8),
        "weights": torch.rand(TOKENS, 2),
        "lengths": int32(7, 9),
        "block_table": int32([2, 0, 1]),
        "k": 3,
    },
    "mqa_logits": lambda: {
        "q": torch.randn(TOKENS, 2, 128),
        "k": torch.randn(5, 128),
        "k_scale": None,
        "weights": torch.rand(TOKENS, 2),
        "starts": int32(0, 1),
        "ends": int32(3, 5),
    },
    "paged_mqa_logits": lambda: {
        "q": torch.randn(1, TOKENS, 2, 128),
        "index_cache": cache_of(INDEX_FP8),
        "weights": torch.rand(TOKENS, 2),
        "context_lens": int32(9),
        "block_table": int32([2, 0, 1]),
        "max_context": 10,
    },
    "topk_per_row": lambda: {
        "logits": torch.randn(TOKENS, 9),
        "starts": int32(0, 2),
        "ends": int32(9, 7),
        "k": 4,
    },
    "select_candidate_blocks": lambda: {
        "logits": torch.randn(TOKENS, 9),
        "lengths": int32(9, 7),
        "count": 2,
        "block_size": 4,
    },
    "mask_candidates": lambda: {
        "logits": torch.randn(TOKENS, 9),
        "blocks": int32([0, 2], [1, -1]),
        "block_size": 4,
    },
    "quantize_and_insert_k_cache": lambda: {
        "k": torch.randn(TOKENS, 512),
        "k_cache": cache_of(MAIN_FP8),
        "slot_mapping": int64(9, 1),
    },
    "dequantize_and_gather_k_cache": lambda: {
        "out": torch.zeros(1, 5, 512),
        "k_cache": cache_of(MAIN_FP8),
        "seq_lens": int32(7),
        "gather_lens": int32(4),
        "block_table": int32([2, 0]),
    },
    "dequant_gather_slots": lambda: {
        "out": torch.zeros(TOKENS, 512),
        "k_cache": cache_of(MAIN_FP8),
        "indices": int32(7, -1),
    },
    "linear": lambda: {"x": torch.randn(TOKENS, 16), "weight": torch.randn(8, 16)},
    "linear_float32": lambda: {"x": torch.randn(TOKENS, 16), "weight": torch.randn(8, 16)},
    "fp8_block_linear": lambda: _scaled(quantize_fp8_weight, 128),
    "mxfp4_linear": lambda: _scaled(quantize_mxfp4, 128),
    "nvfp4_linear": lambda: _scaled(quantize_nvfp4, 128),
    "route_hash": lambda: {
        "x": torch.randn(TOKENS, 16),
        "gate": torch.randn(4, 16),
        "token_ids": int64(1, 2),
        "tid2eid": int64([0, 1], [2, 3], [1, 3]),
        "scale": 1.5,
    },
    "route_biased": lambda: {
        "x": torch.randn(TOKENS, 16),
        "gate": torch.randn(4, 16),
        "bias": torch.randn(4),
        "k": 2,
        "scale": 1.5,
    },
    "swiglu": lambda: {"gate": torch.randn(2, 8), "up": torch.randn(2, 8), "limit": 7.0},
    "experts": _experts,
    "rms_norm": lambda: {"x": torch.randn(TOKENS, 16), "weight": torch.rand(16), "eps": 1e-6},
    "rope": lambda: {
        "x": torch.randn(TOKENS, 2, 128),
        "positions": int64(3, 4),
        "cos_sin_cache": table(),
    },
    "fused_q_kv_rmsnorm": lambda: {
        "qr": torch.randn(TOKENS, 16),
        "kv": torch.randn(TOKENS, 8),
        "q_weight": torch.rand(16),
        "kv_weight": torch.rand(8),
        "eps": 1e-6,
    },
    "qnorm_rope_kv_insert": lambda: {
        "q": torch.randn(TOKENS, 2, 512),
        "kv": torch.randn(TOKENS, 512),
        "k_cache": cache_of(MAIN_FP8),
        "slot_mapping": int64(9, 1),
        "positions": int64(3, 4),
        "cos_sin_cache": table(),
        "eps": 1e-6,
    },
    "grouped_output_projection": lambda: {
        "o": torch.randn(TOKENS, 2, 128),
        "positions": int64(3, 4),
        "cos_sin_cache": table(),
        "wo_a": torch.randn(2, 16, 128),
    },
    "inverse_rope_fp8_quant": lambda: {
        "o": torch.randn(TOKENS, 2, 128),
        "positions": int64(3, 4),
        "cos_sin_cache": table(),
        "n_groups": 2,
    },
    "grouped_output_projection_fp8": lambda: {
        "o": torch.randn(TOKENS, 2, 128).to(torch.float8_e4m3fn),
        "o_scale": torch.rand(TOKENS, 2, 1),
        "wo_a": torch.randint(0, 100, (2, 128, 128), dtype=torch.uint8),
        "wo_a_scale": torch.rand(2, 1, 1),
    },
    "prefill_attention": lambda: _prefill() | {"window": 2, "entries": 2},
    "prefill_attention_backward": lambda: {
        "dout": torch.randn(TOKENS, 2, 512),
        **_prefill(),
        "lists": None,
        "out": torch.randn(TOKENS, 2, 512),
        "lse": torch.randn(TOKENS, 2),
        "window": 2,
        "entries": 2,
    },
    "slot_mapping": lambda: {
        "positions": int64(3, 4),
        "token_to_req": int32(0, 0),
        "block_table": int32([2, 1]),
        "page_size": 4,
    },
    "token_to_request": lambda: {"query_start_loc": int32(0, 1, 2), "num_tokens": 3},
    "compute_global_topk_indices_and_lens": lambda: {
        "topk_indices": int32([0, 5], [3, -1]),
        "token_to_req": int32(0, 0),
        "block_table": int32([2, 1]),
        "block_size": 4,
        "is_valid_token": torch.tensor([True, True]),
    },
    "combine_topk_swa_indices": lambda: {
        "topk_indices": int32([0, 1], [1, 0]),
        "query_start_loc": int32(0, 2),
        "seq_lens": int32(9),
        "gather_lens": int32(5),
        "window_size": 4,
        "compress_ratio": 4,
        "topk": 2,
        "M": 9,
        "N": 3,
    },
    "compressed_rows": lambda: {
        "positions": int64(3, 9),
        "token_to_req": int32(0, 0),
        "block_table": int32([2, 1]),
        "ratio": 4,
        "block_size": 2,
        "width": 3,
    },
    "window_rows": lambda: {
        "positions": int64(3, 4),
        "token_to_req": int32(0, 0),
        "block_table": int32([2, 1]),
        "block_size": 4,
        "window": 3,
    },
    "sparse_attention": _attention,
    "sparse_attention_rows": lambda: {
        "q": torch.randn(TOKENS, 2, 512),
        "kv": torch.randn(5, 512),
        "indices": int32([0, 4], [-1, 3]),
        "lengths": int32(2, 2),
    },
}


def sample_call(name):
    """Arguments of a call of the operation of that name, of new tensors."""
    return _CALLS[name]()


def _codes(width):
    return {"codes": torch.zeros(TOKENS, width).byte(), "code_scales": torch.zeros(TOKENS, 1)}


_TARGETS = {
    "hc_pre": lambda: _codes(32),
    "hc_post_pre_norm": lambda: _codes(32),
    "hc_collapse_norm": lambda: _codes(32),
    "fused_q_kv_rmsnorm": lambda: _codes(16),
    "swiglu": lambda: _codes(8),
    "select_topk": lambda: {
        "out": torch.zeros(TOKENS, 3).int(),
        "slot_table": int32([2, 0, 1]),
        "slots": torch.zeros(TOKENS, 3).int(),
        "counts": torch.zeros(TOKENS).int(),
    },
    "mqa_logits": lambda: {"out": torch.zeros(TOKENS, 5)},
    "paged_mqa_logits": lambda: {"out": torch.zeros(TOKENS, 10)},
    "topk_per_row": lambda: {"out": torch.zeros(TOKENS, 4).int()},
    "qnorm_rope_kv_insert": lambda: {"out": torch.zeros(TOKENS, 2, 512)},
    "prefill_attention": lambda: {"out": torch.zeros(TOKENS, 2, 512)},
    "prefill_attention_backward": lambda: {
        "drows": torch.zeros(5, 512),
        "mass": torch.zeros(TOKENS, 2),
    },
    "sparse_attention": lambda: {"out": torch.zeros(TOKENS, 2, 512)},
    "sparse_attention_rows": lambda: {
        "out": torch.zeros(TOKENS, 2, 512),
        "max_logits": torch.zeros(TOKENS, 2),
    },
}


def quantised_call(name):
    """The call of an attention, "sparse_attention" or "prefill_attention", with its epilogue."""
    return sample_call(name) | {"epilogue": InverseRopeQuant(int64(3, 4), table(), 2)}


def call_with_targets(name):
    """As ``sample_call``, and with everything given that the operation may write."""
    return sample_call(name) | _TARGETS.get(name, dict)()


def operations():
    """All public operations by name."""
    return all_operations()


def copied(value):
    """The same argument in other memory."""
    if isinstance(value, list | tuple):
        members = [copied(each) for each in value]
        return value._make(members) if hasattr(value, "_make") else type(value)(members)
    return value.clone() if isinstance(value, torch.Tensor) else value


def same_bytes(one, other):
    """Whether two tensors are the same, NaN by NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(one, other)
