"""DeepSeek-V4.1's configuration: names, roles of layers, n-grams, and what is refused."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from anymla.layers.engram import NgramHash
from anymla.layers.spec import Candidates
from anymla.model.build import ngram_hash
from anymla.model.config import ConfigError, DSparkConfig, ModelConfig
from anymla.model.config_family import FAMILIES
from anymla.model.layer_specs import layer_specs
from anymla.model.schema import count_values, expected_tensors
from anymla.runtime.cache_groups import cache_groups
from anymla.testing.published import FLASH, FLASH_41

TEXT: dict[str, Any] = FLASH_41["text_config"]


def flash(*without: str, **changes: Any) -> dict[str, Any]:
    text = {name: value for name, value in (TEXT | changes).items() if name not in without}
    return FLASH_41 | {"text_config": text}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dict(FLASH_41)


def test_published_values(config: ModelConfig) -> None:
    assert config.hidden_size == 5120
    assert config.rms_norm_eps == 1e-20
    assert config.hc_eps == 1e-6
    assert config.num_hash_layers == 0
    assert config.quantization is not None
    assert config.quantization.block == (32, 32)
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.image_token_ids == (129264,)
    assert config.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert config.num_nextn_predict_layers == 0
    assert config.dspark == DSparkConfig(
        stages=3, block_size=5, noise_token_id=128799, target_layer_ids=(37, 38, 39),
        taps_at_entry=True, markov_rank=256, experts=128, experts_per_token=3,
    )  # fmt: skip
    assert config.dspark.tapped == (37, 38, 39)


def test_without_the_drafters_fields_there_is_none() -> None:
    names = [name for name in TEXT if name.startswith("dspark_")]
    config = ModelConfig.from_dict(flash(*names))
    assert (config.draft_layers, config.dspark) == (0, None)
    assert config.without_drafts() == ModelConfig.from_dict(FLASH_41, drafts=False)


def test_roles_of_layers(config: ModelConfig) -> None:
    specs = layer_specs(config)
    assert [spec.role for spec in specs] == ["backbone"] * 40 + ["dspark"] * 3
    assert all(spec.ratio == 0 and spec.groups == ("window",) for spec in specs[40:])
    full = [spec.index for spec in specs if spec.compresses]
    again = [spec.index for spec in specs if spec.selects and not spec.compresses]
    assert full == [2, 8, 14, 20]
    assert again == [24, 28, 32, 36]
    assert [spec.index for spec in specs if spec.state_group] == [2, 8, 14]
    candidates = Candidates(20, 2048, 8)
    assert {s.index: s.candidates for s in specs if s.candidates} == dict.fromkeys(
        [20, *again], candidates
    )
    for spec in specs[2:40]:
        kv = 20 if spec.index >= 20 else 2 + (spec.index - 2) // 6 * 6
        index = 20 + (spec.index - 20) // 4 * 4 if spec.index >= 20 else kv
        assert spec.kv_source == (None if spec.index == kv else kv)
        assert spec.index_source == (None if spec.selects else index)
        assert spec.shares_selection == spec.selects
    assert not any(spec.norms_heads or spec.position_bias or spec.overlap for spec in specs)


def test_caches(config: ModelConfig) -> None:
    groups = {group.name: group for group in cache_groups(layer_specs(config))}
    assert {name: len(group.layers) for name, group in groups.items()} == {
        "window": 43, "c1": 1, "index_c1": 1, "c2": 3, "state_c2": 3, "index_c2": 3,
    }  # fmt: skip


def test_tensors(config: ModelConfig) -> None:
    every = expected_tensors(ModelConfig.from_dict(flash(n_routed_experts=6)))
    assert "layers.2.attn.compressor.wgate.weight" in every
    assert "layers.20.attn.compressor.wgate.weight" not in every
    assert "layers.24.attn.indexer.wq_b.weight" in every
    assert "layers.24.attn.indexer.wk.weight" not in every
    assert "layers.3.attn.indexer.wq_b.weight" not in every
    assert every["layers.1.engram.embed.weight"].shape == (384006168, 256)
    assert every["layers.14.engram.wkv.weight"].shape == (25600, 6144)
    assert not [name for name in every if "hc_head" in name or name.endswith(".ape")]
    assert 748e9 * 0.98 < count_values(config) < 748e9 * 1.02


def test_tensors_of_the_drafter(config: ModelConfig) -> None:
    found = {n: e.shape for n, e in expected_tensors(config).items() if n.startswith("mtp.")}
    # A stage is a layer of ratio 0 with experts of its own; the ends have a little more.
    assert sum(".ffn.experts." in name for name in found) == 3 * 128 * 3
    assert found["mtp.1.ffn.gate.weight"] == (128, 5120)
    layer = {name.removeprefix("layers.0.") for name in expected_tensors(config) if "rs.0." in name}
    ends = {
        name: shape
        for name, shape in found.items()
        if ".experts." not in name and name.split(".", 2)[2] not in layer
    }
    assert ends == {
        "mtp.0.main_proj.weight": (5120, 15360),
        "mtp.0.main_norm.weight": (5120,),
        "mtp.2.norm.weight": (5120,),
        "mtp.2.markov_head.embed.weight": (129280, 256),
        "mtp.2.markov_head.head.weight": (129280, 256),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
    }


INFERENCE = {
    "hidden_size": "dim",
    "rms_norm_eps": "norm_eps",
    "qk_rope_head_dim": "rope_head_dim",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
}


def test_names_of_the_inference_code_mean_the_same(config: ModelConfig) -> None:
    text = {INFERENCE.get(name, name): value for name, value in TEXT.items()}
    del text["model_type"]
    flat = {k: v for k, v in FLASH_41.items() if k != "text_config"} | text
    assert ModelConfig.from_dict(flat) == config


@pytest.mark.parametrize("name", ["keeps_one", "has_hash_layers"])
def test_a_fact_of_the_family_stands_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A V4 with one of V4.1's facts has the others as before."""
    other = getattr(FAMILIES["deepseek_v41"], name)
    monkeypatch.setitem(
        FAMILIES, "deepseek_v4", dataclasses.replace(FAMILIES["deepseek_v4"], **{name: other})
    )
    hashes = 0 if name == "has_hash_layers" else 3
    changes = {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 1, 4, 128, 0],
        "num_hash_layers": hashes,
        "n_routed_experts": 6,
    }
    config = ModelConfig.from_dict(FLASH | changes)
    kept = 1 if name == "keeps_one" else 0
    assert config.backbone_ratios == (0, kept, 4, 128)
    assert config.num_hash_layers == hashes
    assert config.sources.kv == ((1, 2, 3) if kept else (2, 3))
    found = expected_tensors(config)
    assert ("layers.0.ffn.gate.tid2eid" in found) == (name != "has_hash_layers")
    if name == "has_hash_layers":
        with pytest.raises(ConfigError, match="num_hash_layers is 3, supported: 0"):
            ModelConfig.from_dict(FLASH)


def test_v4_reads_as_before() -> None:
    specs = layer_specs(ModelConfig.from_dict(FLASH))
    assert all(spec.kv_source is None and spec.index_source is None for spec in specs)
    assert all(spec.compresses == bool(spec.ratio) for spec in specs)
    assert not any(spec.shares_selection or spec.candidates for spec in specs)


def test_a_text_model_may_stand_by_itself(config: ModelConfig) -> None:
    """As a file of its own; what only the file around it says is then not there."""
    assert TEXT["model_type"] == "deepseek_v41_text"
    alone = ModelConfig.from_dict(TEXT)
    around = {
        "bos_token_id": None,
        "eos_token_ids": (),
        "image_token_ids": (),
        "quantization": None,
        "expert_dtype": None,
    }
    assert alone == dataclasses.replace(config, **around)
    outer = {name: value for name, value in FLASH_41.items() if name != "text_config"}
    assert ModelConfig.from_dict(outer | TEXT) == config


REFUSED = [
    (flash(model_type="deepseek_v4_text"), "model_type is 'deepseek_v41', but text_config.mod"),
    (TEXT | {"model_type": "deepseek_text"}, "model_type is 'deepseek_text', supported: 'deepseek"),
    (FLASH_41 | {"text_config": [1]}, "text_config is [1], supported: an object"),
    (FLASH_41 | {"hidden_size": 7}, "hidden_size is 7, but text_config.hidden_size is 5120"),
    (flash(dim=7), "hidden_size is 5120, but dim is 7"),
    (flash("kv_source_layer_ids"), "kv_source_layer_ids is missing"),
    (flash("index_source_layer_ids"), "index_source_layer_ids is missing"),
    (
        flash(kv_source_layer_ids=[2, 14, 8, 20]),
        "kv_source_layer_ids is [2, 14, 8, 20], supported: layers in ascending order, each once",
    ),
    (
        flash(kv_source_layer_ids=[1, 2, 20]),
        "kv_source_layer_ids is [1, 2, 20], supported: layers that compress; layer 1 does not",
    ),
    (
        flash(index_source_layer_ids=[2, 8, 14, 20, 41]),
        "index_source_layer_ids is [2, 8, 14, 20, 41], supported: layers that compress; layer 41",
    ),
    (
        flash(index_source_layer_ids=[2, 20, 24]),
        "index_source_layer_ids is [2, 20, 24], supported: all of kv_source_layer_ids = [2, 8, ",
    ),
    (flash(kv_source_layer_ids=[8, 14, 20]), "layer 2 of ratio 2 has no layer of that ratio"),
    (flash(kv_source_layer_ids=[2, 8, 14]), "layer 20 of ratio 1 has no layer of that ratio"),
    (
        flash(candidate_source_layer_id=24),
        "candidate_source_layer_id is 24, supported: one of kv_source_layer_ids = [2, 8, 14, 20]",
    ),
    (
        flash(candidate_source_layer_id=14),
        "candidate_source_layer_id is 14, supported: the entries of every later index source; "
        "layer 20 has others",
    ),
    (
        flash(candidate_topk_blocks=64),
        "candidate_topk_blocks is 64, supported: blocks that always hold index_topk = 512 entries",
    ),
    (flash("candidate_block_size"), "candidate_block_size is missing"),
    (
        flash(engram_num_embeddings=[384006168]),
        "engram_num_embeddings is [384006168], supported: one for each of 2 layers",
    ),
    (
        flash(engram_num_embeddings=[384006167, 384016682]),
        "engram_num_embeddings is 384006167, supported: 384006168 for layer 1, the sum of its "
        "primes from engram_vocab_size = 16000000 on",
    ),
    (
        flash(engram_num_embeddings=[384006168, 384016683]),
        "engram_num_embeddings is 384016683, supported: 384016682 for layer 14, the sum of its pri",
    ),
    (
        flash(engram_vocab_size=15999000),
        "engram_num_embeddings is 384006168, supported: 3839",
    ),
    (flash(engram_layer_ids=[14, 1]), "engram_layer_ids is [14, 1], supported: ascending layers"),
    (flash(engram_layer_ids=[1, 40]), "engram_layer_ids is [1, 40], supported: ascending layers"),
    (flash(engram_pad_token_id=129280), "engram_pad_token_id is 129280, supported: below vocab_"),
    (FLASH_41 | {"image_token_id": "<image>"}, "image_token_id is '<image>', supported: an integ"),
    (flash("engram_head_dim"), "engram_head_dim is missing"),
    (flash(num_hash_layers=3), "num_hash_layers is 3, supported: 0"),
    (flash(mlp_layer_types=["hash_moe", *["moe"] * 39]), "mlp_layer_types is ['hash_moe', 'moe', "),
    (flash(gate_temp=2.0), "gate_temp is 2.0, supported: 1"),
    (FLASH_41 | {"gate_temp": True}, "gate_temp is True, supported: 1"),
    (flash("scoring_func", score_func="softmax"), "scoring_func is 'softmax', supported: 'sqrtso"),
    (flash(score_func="softmax"), "scoring_func is 'sqrtsoftplus', but score_func is 'softmax'"),
    (
        FLASH_41
        | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config.weight_block_size is [128, 128], supported: [32, 32]",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: {re.escape(message)}") as caught:
        ModelConfig.from_dict(values)
    assert "\n" not in str(caught.value)


def test_fields_that_say_what_is_so_anyway(config: ModelConfig) -> None:
    said = flash(
        gate_temp=1.0, n_group=1, topk_group=1, num_hash_layers=0, mlp_layer_types=["moe"] * 40
    )
    assert ModelConfig.from_dict(said) == config


def test_multipliers_and_moduli(config: ModelConfig) -> None:
    # Golden numbers of DeepSeek's own code; the moduli fill the published tables exactly.
    engram = config.engram
    assert engram is not None
    assert engram.multipliers(1) == (
        76632096046245, 4839876093313, 35959672319349, 73987337458391,
    )  # fmt: skip
    assert engram.multipliers(14) == (
        67716810739261, 51510806800915, 30921347202721, 82619226485591,
    )  # fmt: skip
    primes = engram.primes()
    assert primes[1][:3] == (16000057, 16000079, 16000081)
    assert (primes[1][-1], primes[14][0], primes[14][-1]) == (16000463, 16000477, 16000889)
    assert (sum(primes[1]), sum(primes[14])) == engram.rows


@pytest.fixture
def hashes(config: ModelConfig) -> NgramHash:
    assert config.engram is not None
    identity = torch.arange(config.vocab_size) % config.engram.tokens
    return ngram_hash(config.engram, 1, identity, torch.device("cpu"))


def test_golden_hashes(hashes: NgramHash) -> None:
    rows = hashes(torch.tensor([8]), torch.tensor([[7, 6, 5]]))[0]
    assert rows[[0, 1, 2, 8, 16, 23]].tolist() == [
        11754974, 24210124, 42797160, 143641730, 259287126, 371888815,
    ]  # fmt: skip


def test_what_is_not_there_is_the_padding_token_and_hides_what_lies_behind(
    hashes: NgramHash,
) -> None:
    at = torch.tensor([8])
    first = hashes(at, torch.tensor([[-1, -1, -1]]))
    assert torch.equal(first, hashes(at, torch.tensor([[2, 2, 2]])))
    assert torch.equal(first, hashes(at, torch.tensor([[-1, 6, 5]])))
    assert not torch.equal(first, hashes(at, torch.tensor([[7, -1, -1]])))
