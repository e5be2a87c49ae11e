import contextlib
import copy
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from official_configs import FLASH

from anymla.model.config import ConfigError, ModelConfig, Quantization
from anymla.ops.norm_rope.rope_tables import YarnScaling, inv_freq


def flash(*absent: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (FLASH | changes).items() if name not in absent}


def test_official_flash_values() -> None:
    config = ModelConfig.from_dict(FLASH)
    assert config.compress_ratios == (0, 0, *[4, 128] * 20, 4, 0)
    assert len(config.compress_ratios) == 43 + 1
    assert config.backbone_ratios.count(4) == 21
    assert config.backbone_ratios.count(128) == 20
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert config.yarn == YarnScaling(16.0, 65536, 32.0, 1.0)
    assert config.quantization == Quantization("fp8", (128, 128), "ue8m0", "dynamic")
    assert config.expert_dtype == "fp4"
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.num_hash_layers == 3


def test_without_drafts_keeps_the_backbone() -> None:
    config = ModelConfig.from_dict(FLASH).without_drafts()
    assert config.num_nextn_predict_layers == 0
    assert config.compress_ratios == config.backbone_ratios == (0, 0, *[4, 128] * 20, 4)


def test_ratio_one_is_the_engines_spelling_of_none() -> None:
    ones = [1 if ratio == 0 else ratio for ratio in FLASH["compress_ratios"]]
    assert ModelConfig.from_dict(flash(compress_ratios=ones)) == ModelConfig.from_dict(FLASH)


def test_ratios_of_the_backbone_alone_are_completed() -> None:
    backbone = FLASH["compress_ratios"][:43]
    assert ModelConfig.from_dict(flash(compress_ratios=backbone)) == ModelConfig.from_dict(FLASH)


@pytest.mark.parametrize("eos", [[1, 5], 1, None])
def test_end_of_text_ids(eos: Any) -> None:
    config = ModelConfig.from_dict(flash(eos_token_id=eos))
    assert config.eos_token_ids == {1: (1,), None: ()}.get(eos if eos != [1, 5] else 0, (1, 5))


def test_sources_that_every_layer_is_anyway() -> None:
    ratios = FLASH["compress_ratios"][:43]
    said = flash(
        kv_source_layer_ids=[layer for layer, ratio in enumerate(ratios) if ratio],
        index_source_layer_ids=[layer for layer, ratio in enumerate(ratios) if ratio == 4],
        candidate_source_layer_id=-1,
    )
    assert ModelConfig.from_dict(said) == ModelConfig.from_dict(FLASH)


YARN = FLASH["rope_scaling"]
SPELLINGS = {
    "rope_scaling": flash(),
    "rope_type": flash(
        rope_scaling={**{k: v for k, v in YARN.items() if k != "type"}, "rope_type": "yarn"}
    ),
    "flat rope_parameters": flash("rope_scaling", rope_parameters=YARN),
    "flat with theta": flash(
        "rope_scaling", "rope_theta", rope_parameters={**YARN, "rope_theta": 10000.0}
    ),
    "nested": flash(
        "rope_scaling",
        "rope_theta",
        "compress_rope_theta",
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": {
                **YARN,
                "rope_theta": 160000.0,
                "partial_rotary_factor": 0.125,
                "attention_factor": 1.0,
            },
        },
    ),
}


NESTED = SPELLINGS["nested"]["rope_parameters"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_rotary_tables(spelling: str) -> None:
    config = ModelConfig.from_dict(SPELLINGS[spelling])
    assert config == ModelConfig.from_dict(FLASH)
    table = inv_freq(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)
    # Golden values: pairs 0 to 15 turn as fast as without YaRN, pairs 25 to 31 at a sixteenth.
    for pair, value in ((0, 1.0), (15, 3.635538584e-03), (31, 5.680529037e-07)):
        torch.testing.assert_close(table[pair].item(), value, rtol=1e-6, atol=0)


def test_rope_parameters_beside_rope_scaling_are_not_read() -> None:
    """Tools leave theirs beside the published one, which transformers then takes."""
    plain = {"rope_theta": 10000.0, "rope_type": "default"}
    for ignored in (plain, {**YARN, "factor": 2}, NESTED, {"main": None}):
        assert ModelConfig.from_dict(flash(rope_parameters=ignored)) == ModelConfig.from_dict(FLASH)
    for empty in ({}, None):
        values = flash(rope_scaling=empty, rope_parameters=YARN)
        assert ModelConfig.from_dict(values) == ModelConfig.from_dict(FLASH)


def test_every_choice_among_rope_fields_is_that_of_transformers_or_refused() -> None:
    """Random files: two layouts, nested and flat, absent, null and contradicting fields."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding
    from transformers.utils import logging

    logging.set_verbosity_error()
    draw = random.Random(39)
    counts: Counter[str] = Counter()
    for _ in range(400):
        values = random_rope_fields(draw)
        try:
            ours = ModelConfig.from_dict(values)
        except ConfigError:
            counts["refused"] += 1
            continue
        theirs = DeepseekV4RotaryEmbedding(DeepseekV4Config(**copy.deepcopy(values)))
        assert theirs.main_attention_scaling == theirs.compress_attention_scaling == 1, values
        for table, theta, yarn in (
            (theirs.main_inv_freq, ours.rope_theta, None),
            (theirs.compress_inv_freq, ours.compress_rope_theta, ours.yarn),
        ):
            expected = inv_freq(ours.qk_rope_head_dim, theta, yarn)
            torch.testing.assert_close(
                table, expected, rtol=1e-5, atol=0, msg=lambda said, v=values: f"{v}: {said}"
            )
        counts["yarn" if ours.yarn else "default"] += 1
    assert min(counts[kind] for kind in ("refused", "yarn", "default")) > 40, counts


def random_rope_fields(draw: random.Random) -> dict[str, Any]:
    """A file of three layers with RoPE said anywhere, most of it as published."""

    def some(**pools: list[Any]) -> dict[str, Any]:
        """Of each pool nothing in a quarter of all draws, mostly its first, sometimes another."""
        drawn = {}
        for name, pool in pools.items():
            if draw.random() < 0.75:
                drawn[name] = pool[0] if draw.random() < 0.85 else draw.choice(pool)
        return drawn

    def table(kind: str) -> dict[str, Any]:
        return {"rope_type": kind} | some(
            type=[kind, "linear"],
            rope_type=[kind, kind, None],
            attention_factor=[1.0, 1.2, None],
            beta_fast=[32, 16],
            beta_slow=[1],
            rope_theta=[10000.0, 5000.0],
            partial_rotary_factor=[0.125, 0.125, 0.25],
            mscale=[1.0],
            truncate=[True, False],
        )

    def yarn() -> dict[str, Any]:
        sizes = {"factor": draw.choice([16, 16, 8]), "original_max_position_embeddings": 65536}
        made = table("yarn") | sizes
        if draw.random() < 0.1:
            del made[draw.choice(list(made))]
        return made

    def section() -> Any:
        kind = draw.choice(["flat", "flat", "default", "nested", "nested", "empty", "half"])
        compress = yarn() if draw.random() < 0.7 else table("default")
        return {
            "flat": yarn(),
            "default": table("default"),
            "nested": {"main": table("default"), "compress": compress, **some(rope_type=["yarn"])},
            "half": {draw.choice(["main", "compress"]): compress},
            "empty": draw.choice([{}, None]),
        }[kind]

    values = flash(
        "rope_theta",
        "compress_rope_theta",
        "rope_scaling",
        num_hidden_layers=3,
        num_nextn_predict_layers=0,
        compress_ratios=[0, 4, 128],
    )
    values |= some(rope_theta=[10000, 5000], compress_rope_theta=[160000, 40000])
    values |= {name: section() for name in draw.sample(["rope_scaling", "rope_parameters"], 2)}
    for name in ("rope_scaling", "rope_parameters"):
        if draw.random() < 0.3:
            del values[name]
    if draw.random() < 0.2:
        values |= some(partial_rotary_factor=[0.125, 0.25], original_seq_len=[65536, 0])
    return values


def test_a_limit_of_zero_is_none() -> None:
    for zero in (0, 0.0):
        assert ModelConfig.from_dict(flash(swiglu_limit=zero)).swiglu_limit == math.inf
    for false in (False, "0"):
        with pytest.raises(ConfigError, match="swiglu_limit is"):
            ModelConfig.from_dict(flash(swiglu_limit=false))


def test_no_scaling_at_all() -> None:
    assert ModelConfig.from_dict(flash("rope_scaling")).yarn is None


def through_transformers(values: dict[str, Any], directory: Path) -> ModelConfig:
    from transformers import DeepseekV4Config
    from transformers.utils import logging

    logging.set_verbosity_error()
    # It writes into the dictionaries that it is given.
    DeepseekV4Config(**copy.deepcopy(values)).save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    assert "layer_types" in written
    assert "compress_ratios" not in written
    return ModelConfig.from_dir(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compress_ratios": [128, 128, *[4, 128] * 20, 4, 0], "num_hash_layers": 0},
        {"rope_scaling": {**YARN, "factor": 8, "original_max_position_embeddings": 131072}},
        {"rope_scaling": None, "rope_theta": 5000.0, "compress_rope_theta": 20000.0},
        {"eos_token_id": [1, 7], "expert_dtype": "fp8"},
        {"quantization_config": None, "expert_dtype": None, "num_hash_layers": 43},
        {"tie_word_embeddings": True, "swiglu_limit": 7.0, "routed_scaling_factor": 2.5},
    ],
    ids=["flash", "ratios", "yarn", "no-yarn", "eos", "unquantised", "scalars"],
)
def test_transformers_spelling_reads_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    values = flash(**changes)
    assert through_transformers(values, tmp_path) == ModelConfig.from_dict(values)


def test_transformers_compress_rates(tmp_path: Path) -> None:
    values = flash(
        "compress_ratios",
        num_hidden_layers=3,
        layer_types=[
            "heavily_compressed_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 64},
    )
    assert through_transformers(values, tmp_path).compress_ratios == (64, 0, 4, 0)


OVERLONG = [*FLASH["compress_ratios"], 4]
PARTIAL = {"partial_rotary_factor": 0.125}
REFUSED = [
    (flash(model_type="deepseek_v5"), r"model_type is 'deepseek_v5', supported: 'deepseek_v4' or"),
    (flash("model_type"), r"model_type is None, supported: 'deepseek_v4'"),
    (flash("hidden_size"), r"hidden_size is missing"),
    (flash(hidden_size=None), r"hidden_size is missing"),
    (flash(hidden_size="big"), r"hidden_size is 'big', supported: an integer >= 1"),
    (flash(hidden_size=True), r"hidden_size is True, supported: an integer >= 1"),
    (flash(hidden_size=0), r"hidden_size is 0, supported: an integer >= 1"),
    (flash(rms_norm_eps=math.nan), r"rms_norm_eps is nan, supported: a positive number"),
    (flash(swiglu_limit=-1), r"swiglu_limit is -1, supported: a positive number"),
    (flash(head_dim=256), r"head_dim is 256, supported: 512"),
    (flash(qk_rope_head_dim=32), r"qk_rope_head_dim is 32, supported: 64"),
    (flash(partial_rotary_factor=0.25), r"partial_rotary_factor is 0.25, supported: 0.125"),
    (flash("qk_rope_head_dim"), r"qk_rope_head_dim is missing"),
    (flash(qk_nope_head_dim=128), r"qk_nope_head_dim is 128, supported: 448"),
    (flash(v_head_dim=128), r"v_head_dim is 128, supported: 512"),
    (flash(index_head_dim=64), r"index_head_dim is 64, supported: 128"),
    (flash(num_key_value_heads=8), r"num_key_value_heads is 8, supported: 1"),
    (flash(n_shared_experts=2), r"n_shared_experts is 2, supported: 1"),
    (flash(scoring_func="sigmoid"), r"scoring_func is 'sigmoid', supported: 'sqrtsoftplus'"),
    (flash(topk_method="greedy"), r"topk_method is 'greedy', supported: 'noaux_tc'"),
    (flash(norm_topk_prob=False), r"norm_topk_prob is False, supported: True"),
    (flash(hidden_act="gelu"), r"hidden_act is 'gelu', supported: 'silu'"),
    (flash(gate_temp=0.5), r"gate_temp is 0.5, supported: 1"),
    (flash(n_group=8), r"n_group is 8, supported: 1"),
    (flash(topk_group=4), r"topk_group is 4, supported: 1"),
    (
        flash(kv_source_layer_ids=[2, 8]),
        r"kv_source_layer_ids is \[2, 8\], supported: every layer that compresses$",
    ),
    (
        flash(index_source_layer_ids=[2]),
        r"index_source_layer_ids is \[2\], supported: every layer of ratio 4$",
    ),
    (flash(candidate_source_layer_id=2), r"candidate_source_layer_id is 2, supported: -1"),
    (flash(attention_bias=True), r"attention_bias is True, supported: False"),
    (flash(attention_bias=0), r"attention_bias is 0, supported: False"),
    (flash(o_groups=5), r"o_groups is 5, supported: a divisor of num_attention_heads = 64"),
    (flash(num_experts_per_tok=300), r"num_experts_per_tok is 300, .* n_routed_experts = 256"),
    (flash(bos_token_id=129280), r"bos_token_id is 129280, supported: below vocab_size = 129280"),
    (flash(eos_token_id=[1, 200000]), r"eos_token_id is 200000, supported: below vocab_size"),
    (flash("compress_ratios"), r"compress_ratios is missing"),
    (flash(compress_ratios=[0, 4]), r"compress_ratios is \[0, 4\], .* each of 43 layers"),
    (flash(compress_ratios=OVERLONG), r"compress_ratios is .*one entry for each of 43 layers"),
    (flash(compress_ratios="4"), r"compress_ratios is '4', supported: a list of integers"),
    (flash(compress_ratios=[0.5]), r"compress_ratios is \[0.5\], supported: a list of integers"),
    (flash(compress_ratios=[4] * 44), r"compress_ratios is .*supported: 0 for draft layers"),
    (
        flash(layer_types=["sliding_attention"] * 43),
        r"compress_ratios is \[0, 0, 4.*but layer_types means \[0, 0, 0",
    ),
    (
        flash("compress_ratios", layer_types=["sliding_attention"] * 4),
        r"layer_types is .*, supported: a list of 43 entries",
    ),
    (
        flash("compress_ratios", layer_types=["full_attention"] * 43),
        r"layer_types is 'full_attention', supported: sliding_attention, ",
    ),
    (
        flash("compress_ratios", layer_types=["compressed_sparse_attention"] * 43),
        r"compress_rates.compressed_sparse_attention is missing",
    ),
    (
        flash(
            "compress_ratios",
            layer_types=["compressed_sparse_attention"] * 43,
            compress_rates={"compressed_sparse_attention": 8},
        ),
        r"compress_rates.compressed_sparse_attention is 8, supported: 4",
    ),
    (
        flash(
            "compress_ratios",
            layer_types=["heavily_compressed_attention"] * 43,
            compress_rates={"heavily_compressed_attention": 4},
        ),
        r"compress_rates.heavily_compressed_attention is 4, supported: another ratio than 4",
    ),
    (
        flash(mlp_layer_types=["moe", *["hash_moe"] * 42]),
        r"mlp_layer_types is .*'hash_moe' first and 'moe' after",
    ),
    (flash("num_hash_layers"), r"num_hash_layers is missing"),
    (flash("rope_theta"), r"rope_theta is missing"),
    (flash("compress_rope_theta"), r"compress_rope_theta is missing"),
    (
        flash(rope_scaling={**YARN, "type": "linear"}),
        r"rope_scaling.type is 'linear', supported: 'default' or 'yarn'",
    ),
    (
        flash(rope_scaling={**YARN, "attention_factor": 1.2}),
        r"rope_scaling.attention_factor is 1.2, supported: 1",
    ),
    (
        flash(rope_scaling={**YARN, "truncate": False}),
        r"rope_scaling.truncate is False, supported: True",
    ),
    (
        flash(rope_scaling={"type": "yarn", "factor": 4}),
        r"rope_scaling.original_max_position_embeddings is missing",
    ),
    (
        flash(
            "rope_scaling",
            rope_parameters={**NESTED, "main": {**NESTED["main"], "rope_type": "yarn"}},
        ),
        r"rope_parameters.main.rope_type is 'yarn', supported: 'default'",
    ),
    (
        flash(
            "rope_scaling",
            rope_parameters={
                **NESTED,
                "compress": {
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.125,
                    "rope_type": "su",
                },
            },
        ),
        r"rope_parameters.compress.rope_type is 'su', supported: 'default' or 'yarn'",
    ),
    (
        flash(
            "rope_scaling",
            rope_parameters={**NESTED, "main": {**NESTED["main"], "partial_rotary_factor": 1.0}},
        ),
        r"rope_parameters.main.partial_rotary_factor is 1.0, supported: 0.125",
    ),
    (
        flash("rope_scaling", rope_parameters={**NESTED, "main": {"type": "yarn", **PARTIAL}}),
        r"rope_parameters.main.type is 'yarn', supported: 'default'",
    ),
    (
        flash("rope_scaling", rope_parameters={"compress": NESTED["compress"]}),
        r"rope_parameters.main is missing",
    ),
    (
        flash("rope_scaling", rope_parameters={**NESTED, "compress": None}),
        r"rope_parameters.compress is missing",
    ),
    (
        flash("rope_scaling", rope_parameters={**NESTED, "compress": {**YARN, **PARTIAL}}),
        r"rope_parameters.compress.attention_factor is missing, supported: 1",
    ),
    (
        flash("rope_scaling", rope_parameters={**NESTED, "main": {"rope_theta": 1e4}}),
        r"rope_parameters.main.partial_rotary_factor is missing",
    ),
    (
        flash("rope_scaling", rope_parameters={**NESTED, "compress": {"factor": 2, **PARTIAL}}),
        r"rope_parameters.compress.rope_theta is missing",
    ),
    (
        flash("rope_theta", rope_scaling={**YARN, "rope_theta": 5000.0}),
        r"rope_scaling.rope_theta is 5000.0, supported: 10000.0",
    ),
    (
        flash(rope_scaling={**YARN, "rope_type": "default"}),
        r"rope_scaling.type is 'yarn', supported: 'default'",
    ),
    (
        flash(rope_scaling={**YARN, "rope_type": None}),
        r"rope_scaling.rope_type is None, supported: 'default' or 'yarn'",
    ),
    (
        flash(rope_scaling={**YARN, "attention_factor": None}),
        r"rope_scaling.attention_factor is None, supported: 1",
    ),
    (flash(rope_factor=40), r"rope_factor is 40, supported: 16.0"),
    (flash(original_seq_len=4096), r"original_seq_len is 4096, supported: 65536"),
    (flash(original_max_position_embeddings=4096), r"original_max_position_.* supported: 65536"),
    (flash(beta_fast=64), r"beta_fast is 64, supported: 32.0"),
    (flash("rope_scaling", original_seq_len=65536), r"original_seq_len is 65536, supported: 0"),
    (flash("rope_scaling", rope_factor=16), r"rope_factor is 16, supported: 1"),
    (flash(n_layers=42), r"num_hidden_layers is 43, but n_layers is 42"),
    (flash(num_local_experts=64), r"n_routed_experts is 256, but num_local_experts is 64"),
    (flash(intermediate_size=8192), r"moe_intermediate_size is 2048, but intermediate_size is"),
    (flash(compress_rate_hca=64), r"compress_rates.heavily_compressed_attention is 64, .*: 128"),
    (
        flash(compress_rates={"compressed_sparse_attention": 8}),
        r"compress_rates.compressed_sparse_attention is 8, supported: 4",
    ),
    (
        flash(compress_rate_csa=8, compress_rates={"compressed_sparse_attention": 4}),
        r"compress_rate_csa is 8, supported: 4",
    ),
    (
        flash(mlp_layer_types=["hash_moe", *["moe"] * 42]),
        r"num_hash_layers is 3, but mlp_layer_types has 1 'hash_moe'",
    ),
    (
        flash(quantization_config={"quant_method": "awq"}),
        r"quantization_config.quant_method is 'awq', supported: 'fp8' or 'modelopt'",
    ),
    (flash(quantization_config={"fmt": "e4m3"}), r"quantization_config.quant_method is missing"),
    (flash(quantization_config=["fp8"]), r"quantization_config is \['fp8'\], supported: an object"),
    (
        flash(quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]}),
        r"quantization_config.weight_block_size is \[32, 32\], supported: \[128, 128\]",
    ),
    (
        flash(quantization_config={"quant_method": "fp8", "fmt": "e5m2"}),
        r"quantization_config.fmt is 'e5m2', supported: 'e4m3'",
    ),
    (
        flash(quantization_config={"quant_method": "fp8", "activation_scheme": "static"}),
        r"quantization_config.activation_scheme is 'static', supported: 'dynamic'",
    ),
    (
        flash(quantization_config={"quant_method": "fp8", "scale_fmt": "bf16"}),
        r"quantization_config.scale_fmt is 'bf16', supported: 'ue8m0' or 'fp32' or 'float32'",
    ),
    (flash(expert_dtype="int4"), r"expert_dtype is 'int4', supported: 'fp4' or 'fp8' or 'bf16'"),
    (
        flash(quantization_config={**FLASH["quantization_config"], "expert_dtype": "fp8"}),
        r"expert_dtype is 'fp4', but quantization_config.expert_dtype is 'fp8'",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: {message}") as caught:
        ModelConfig.from_dict(values)
    assert "\n" not in str(caught.value)


@given(name=st.sampled_from(sorted(FLASH)), value=st.sampled_from([-1, [], {}, "?", math.inf, 1.5]))
def test_nonsense_is_refused_or_harmless(name: str, value: Any) -> None:
    """Whatever a field holds, reading it never ends in another error than ConfigError."""
    with contextlib.suppress(ConfigError):
        assert isinstance(ModelConfig.from_dict(flash(**{name: value})), ModelConfig)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("num_hidden_layers", 10**9, 1024),
        ("num_nextn_predict_layers", 10**9, 64),
        ("n_routed_experts", 10**8, 65536),
        ("hc_sinkhorn_iters", 10**9, 1000),
        ("hc_mult", 10**6, 64),
        ("vocab_size", 2**31, 2**31 - 1),
        ("sliding_window", 2**40, 2**31 - 1),
        ("hidden_size", 1e300, 2**31 - 1),
    ],
)
def test_sizes_that_nothing_has(name: str, value: float, most: int) -> None:
    shown = int(value) if value < 1e100 else str(int(value))[:20]
    with pytest.raises(ConfigError, match=rf"{name} is {shown}.*: an integer <= {most}$") as caught:
        ModelConfig.from_dict(flash(**{name: value}))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [10**400, 1e300, 3.5e38, 1e-320, 1e-38])
def test_a_number_beyond_float32(value: float) -> None:
    for name in ("rope_theta", "swiglu_limit", "hc_eps"):
        with pytest.raises(ConfigError, match=rf"{name} is .*, supported: a positive number that"):
            ModelConfig.from_dict(flash(**{name: value}))


def test_a_window_longer_than_every_position() -> None:
    values = {"sliding_window": 10**9, "max_position_embeddings": 1 << 20}
    with pytest.raises(ConfigError, match=r"sliding_window is 10{9}, supported: at most max_pos"):
        ModelConfig.from_dict(flash(**values))


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(ConfigError, match=r"compress_ratios is \[") as caught:
        ModelConfig.from_dict(flash(compress_ratios=[-1] * 10**5))
    assert len(str(caught.value)) < 300


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such directory$"):
        ModelConfig.from_dir(tmp_path / "nowhere")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a checkpoint, it has no config.json$"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: "),
        ("[1]", "cannot be read: not a JSON object, but a list"),
        ("\xff", "cannot be read: "),
    ],
)
def test_config_that_is_no_json_object(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        ModelConfig.from_dir(tmp_path)
