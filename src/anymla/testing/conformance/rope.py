"""Cases R1 .. R5: rotary positions."""

from __future__ import annotations

import torch

from anymla.formats.page_layout import ROWS_FP32_512, get_layout
from anymla.model.config import ModelConfig
from anymla.ops.attention import CacheRows
from anymla.ops.norm_rope import YarnScaling, cos_sin_table, inv_freq
from anymla.testing.conformance.expected import EPS, attend, table, v4_config
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.tolerance import assert_close, assert_identical, ulps

POSITIONS = (0, 1, 127, 2048, 65536, 200_000)
YARN = YarnScaling(16.0, 65536)


@case("R1", "base 10000 without compression, 160000 and YaRN with it", "rope")
def bases(ops: Ops) -> None:
    golden = {
        0: 1.0,
        15: 3.635538584e-03,
        16: 2.265625e-03,
        20: 2.969777783e-04,
        25: 5.372312671e-06,
        31: 5.680529037e-07,
    }
    compressed = inv_freq(64, 160000.0, YARN)
    for pair, value in golden.items():
        want = torch.tensor([value], dtype=torch.float64)
        got = compressed[pair : pair + 1]
        assert_close(got, want, rtol=ulps(torch.float32, 4), name=f"frequency of pair {pair}")
    plain = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert_close(inv_freq(64, 10000.0), plain, rtol=ulps(torch.float32, 4), name="plain")

    x = torch.randn(len(POSITIONS), 2, 512)
    for yarn, theta in ((None, 10000.0), (YARN, 160000.0)):
        ours = inv_freq(64, theta, yarn)
        rows = torch.cat([cos_sin_table(ours, p, p + 1) for p in POSITIONS])
        got = ops.rope(x, torch.arange(len(POSITIONS)), rows)
        oracle = frequencies(v4_config(), compressed=yarn is not None)
        want = rotate(x.double(), torch.tensor(POSITIONS), oracle)
        # A cosine and a sine rounded to float32, two products and their sum.
        slack = ulps(torch.float32, 3)
        assert_close(got, want, atol=slack, scale=4.0, rtol=slack, name=f"theta {theta:g}")


@case("R2", "entry w is rotated at position w * ratio", "compress_norm_rope_insert", quick=True)
def entry_positions(ops: Ops) -> None:
    for ratio in (4, 128):
        width = 512 * (2 if ratio == 4 else 1)
        tokens = 4 * ratio
        states = torch.randn(1, tokens, 2 * width)
        # If one row's logit is far above the others, the entry equals that row.
        states[..., width:] = -1e4
        own = torch.arange(tokens) % ratio == 1
        states[0, own, 2 * width - 512 :] = 1e4
        cache = get_layout(ROWS_FP32_512).allocate(1, 4)
        positions = torch.arange(tokens)
        closing = (positions + 1) % ratio == 0
        ops.compress_norm_rope_insert(
            states,
            torch.zeros(1, 1, dtype=torch.int32),
            positions,
            torch.zeros(tokens, dtype=torch.int32),
            positions,
            torch.ones(512),
            EPS,
            table(tokens, compressed=True),
            cache,
            torch.where(closing, positions // ratio, -1),
            compress_ratio=ratio,
            overlap=ratio == 4,
            layout=ROWS_FP32_512,
        )
        rows = rms_norm(states[0, own, width - 512 : width].double(), None, EPS)
        want = rotate(rows, torch.arange(4) * ratio, frequencies(v4_config(), compressed=True))
        slack = ulps(torch.float32, 8)
        assert_close(cache[0], want, atol=slack, scale=4.0, rtol=slack, name=f"ratio {ratio}")


@case("R3", "YaRN scales neither the tables nor the softmax", "sparse_attention")
def no_mscale(ops: Ops) -> None:
    rows = cos_sin_table(inv_freq(64, 160000.0, YARN), 0, 3000)
    length = rows[:, :32].square() + rows[:, 32:].square()
    # The sum has two squares of numbers rounded to float32.
    one = torch.ones(1, dtype=torch.float64).expand_as(length)
    assert_close(length, one, atol=ulps(torch.float32, 3), name="cos^2 + sin^2")
    cache = get_layout(ROWS_FP32_512).allocate(1, 16)
    cache.normal_()
    q = torch.randn(2, 3, 512)
    indices = torch.stack([torch.randperm(16) for _ in range(2)]).int()
    want = attend(q, [cache[0, row.long()].double() for row in indices], scale=512**-0.5)
    listed = CacheRows(cache, ROWS_FP32_512, indices)
    want.check(ops.sparse_attention(q, [listed]), "default scale")


@case("R4", "interleaved pairs of the last 64 channels; the inverse undoes it", "rope")
def pairs(ops: Ops) -> None:
    x = torch.randn(5, 2, 512)
    positions = torch.tensor([0, 1, 63, 500, 999])
    cos_sin = table(1000, compressed=False)
    rotated = ops.rope(x, positions, cos_sin)
    assert_identical(rotated[..., :448], x[..., :448], name="channels that do not turn")
    inverse = frequencies(v4_config(), compressed=False)
    slack = ulps(torch.float32, 3)
    want = rotate(x.double(), positions, inverse)
    assert_close(rotated, want, atol=slack, scale=4.0, rtol=slack, name="rotated")
    back = ops.rope(rotated, positions, cos_sin, inverse=True)
    assert_close(back, x, atol=2 * slack, scale=4.0, rtol=2 * slack, name="rotated and back")


@case("R5", "every spelling of the rope parameters builds the same tables")
def spellings(ops: Ops) -> None:
    del ops
    yarn = {
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    common = _sizes()
    legacy = common | {
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": yarn | {"type": "yarn"},
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "qk_rope_head_dim": 64,
    }
    flat = {key: value for key, value in legacy.items() if key != "rope_scaling"}
    flat |= {"rope_parameters": yarn | {"rope_type": "yarn"}}
    nested = common | {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            # Without this factor transformers would scale cosines and sines.
            "compress": yarn
            | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
        },
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "partial_rotary_factor": 64 / 512,
    }
    want = frequencies(v4_config(), compressed=True)
    for name, raw in (("legacy", legacy), ("flat", flat), ("nested", nested)):
        config = ModelConfig.from_dict(raw)
        expect(config.rope_theta == 10000, f"{name}: rope_theta {config.rope_theta}")
        got = inv_freq(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)
        assert_identical(got, want, name=f"{name}: frequencies")
        expect(tuple(config.compress_ratios[:3]) == (0, 4, 128), f"{name}: ratios")


def _sizes() -> dict[str, object]:
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 128,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 16,
        "max_position_embeddings": 1048576,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
