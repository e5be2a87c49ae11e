"""DSpark checkpoints: names and shapes as published, what loads, and what is refused by name."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, Tensors, changed
from official_configs import FLASH, FLASH_0731, PRO_0813

from anymla.model.checkpoint import Checkpoint, CheckpointError, TensorInfo
from anymla.model.config import ConfigError, ModelConfig
from anymla.model.drafts import choose_drafts, present_config
from anymla.model.layer_specs import layer_specs
from anymla.model.load import load_model
from anymla.model.schema import expected_linears, expected_tensors
from anymla.model.verify import verify
from anymla.runtime import threads
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

# Every stage, in the headers of DeepSeek-V4-Flash-0731; behind a linear layer's shape its scale's.
STAGE: dict[str, tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]]] = {
    "attn.wq_a": ((1024, 4096), (8, 32)),
    "attn.wq_b": ((32768, 1024), (256, 8)),
    "attn.wkv": ((512, 4096), (4, 32)),
    "attn.wo_a": ((8192, 4096), (64, 32)),
    "attn.wo_b": ((4096, 8192), (32, 64)),
    "attn.q_norm.weight": (1024,),
    "attn.kv_norm.weight": (512,),
    "attn.attn_sink": (64,),
    "attn_norm.weight": (4096,),
    "ffn_norm.weight": (4096,),
    "hc_attn_fn": (24, 16384),
    "hc_attn_base": (24,),
    "hc_attn_scale": (3,),
    "hc_ffn_fn": (24, 16384),
    "hc_ffn_base": (24,),
    "hc_ffn_scale": (3,),
    "ffn.gate.weight": (256, 4096),
    "ffn.gate.bias": (256,),
    "ffn.shared_experts.w1": ((2048, 4096), (16, 32)),
    "ffn.shared_experts.w3": ((2048, 4096), (16, 32)),
    "ffn.shared_experts.w2": ((4096, 2048), (32, 16)),
    **{
        f"ffn.experts.{expert}.{name}": (
            ((4096, 1024), (4096, 64)) if name == "w2" else ((2048, 2048), (2048, 128))
        )
        for expert in range(256)
        for name in ("w1", "w2", "w3")
    },
}
EXTRAS: dict[int, dict[str, Any]] = {
    0: {"main_proj": ((4096, 12288), (32, 96)), "main_norm.weight": (4096,)},
    1: {},
    2: {
        "norm.weight": (4096,),
        "hc_head_fn": (4, 16384),
        "hc_head_base": (4,),
        "hc_head_scale": (1,),
        "markov_head.markov_w1.weight": (129280, 256),
        "markov_head.markov_w2.weight": (129280, 256),
        "confidence_head.proj.weight": (1, 4352),
    },
}


def published_names() -> dict[str, tuple[int, ...]]:
    out: dict[str, Any] = {}
    for stage, extras in EXTRAS.items():
        for name, shape in (STAGE | extras).items():
            if isinstance(shape[0], tuple):
                out[f"mtp.{stage}.{name}.weight"], out[f"mtp.{stage}.{name}.scale"] = shape
            else:
                out[f"mtp.{stage}.{name}"] = shape
    return out


def stored_as_published(config: ModelConfig) -> dict[str, TensorInfo]:
    """What the kinds of linear layers are read from: FP4 experts, FP8 for the rest."""
    return {
        f"{prefix}.weight": TensorInfo(
            (), "I8" if ".ffn.experts." in prefix else "F8_E4M3", Path(), 0, ""
        )
        for prefix in expected_linears(config)
        if prefix.startswith("mtp.")
    }


def test_names_and_shapes_are_those_of_the_published_files() -> None:
    config = ModelConfig.from_dict(FLASH_0731)
    expected = expected_tensors(config, stored_as_published(config))
    ours = {name: each.shape for name, each in expected.items() if name.startswith("mtp.")}
    assert ours == published_names()
    assert not [name for name, each in expected.items() if each.optional]
    # As two audits of the published files counted them.
    assert Counter(name.split(".")[1] for name in ours) == {"0": 1568, "1": 1565, "2": 1572}
    assert sum(name.endswith(".scale") for name in ours) == 2329
    backbone = expected_tensors(ModelConfig.from_dict(FLASH).without_drafts())
    without = expected_tensors(config.without_drafts())
    assert without == backbone


def test_shapes_of_the_larger_model() -> None:
    expected = expected_tensors(ModelConfig.from_dict(PRO_0813))
    for name, shape in {
        "mtp.0.main_proj.weight": (7168, 3 * 7168),
        "mtp.2.markov_head.markov_w2.weight": (129280, 512),
        "mtp.2.confidence_head.proj.weight": (1, 7680),
        "mtp.1.attn.wq_b.weight": (65536, 1536),
        "mtp.2.ffn.experts.383.w2.weight": (7168, 3072),
    }.items():
        assert expected[name].shape == shape
    assert "mtp.3.attn_norm.weight" not in expected


@pytest.mark.parametrize("values", [FLASH_0731, PRO_0813], ids=["flash", "pro"])
def test_stages_are_window_only_layers_that_score_their_experts(values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(values)
    stages = layer_specs(config)[config.num_hidden_layers :]
    assert [(spec.role, spec.ratio, spec.selects) for spec in stages] == [("dspark", 0, False)] * 3
    assert stages[0].index >= config.num_hash_layers
    assert (config.num_nextn_predict_layers, config.draft_layers) == (0, 3)
    assert config.default_draft_tokens == 5
    assert config.without_drafts().compress_ratios == config.backbone_ratios


def small(**changes: Any) -> TinyOptions:
    return TinyOptions(**{**vars(SMALL), "drafter": "dspark", "markov_rank": 24, **changes})


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dspark")
    write_tiny_checkpoint(directory, small())
    return directory


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    write_tiny_checkpoint(directory, SMALL)
    return directory


@pytest.mark.parametrize("weights", ["fp4", "fp8", "bf16"])
@pytest.mark.parametrize("drafts", ["auto", "dspark", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loads_with_each_option(
    tmp_path: Path, weights: str, drafts: Any, dtype: torch.dtype
) -> None:
    write_tiny_checkpoint(tmp_path, small(weights=weights))
    model = load_model(tmp_path, dtype=dtype, drafts=drafts, progress=False)
    assert len(model.drafts) == 0
    assert len(model.layers) == 3
    if drafts == "off":
        assert model.dspark is None
        assert len(model.layer_specs) == 3
        return
    assert model.dspark is not None
    assert len(model.dspark.stages) == 3
    assert (model.dspark.block_size, model.dspark.noise_token_id) == (5, SMALL.vocab - 1)
    assert model.dspark.tapped == (1, 2, 3)  # behind layers 0, 1, 2
    assert model.dspark.markov.w1.shape == model.dspark.markov.w2.shape == (SMALL.vocab, 24)
    assert model.dspark.markov.confidence is not None
    assert [spec.role for spec in model.layer_specs] == ["backbone"] * 3 + ["dspark"] * 3


def test_an_mtp_checkpoint_loads_as_before(mtp: Path) -> None:
    for drafts, layers in (("auto", 1), ("mtp", 1), ("off", 0)):
        model = load_model(mtp, drafts=drafts, progress=False)  # type: ignore[arg-type]
        assert (len(model.drafts), model.dspark) == (layers, None)
    with pytest.raises(CheckpointError, match=r"holds MTP layers, asked for: a DSpark drafter$"):
        load_model(mtp, drafts="dspark", progress=False)


def test_another_drafter_than_is_there(dspark: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a DSpark drafter, asked for: MTP layers$"):
        load_model(dspark, drafts="mtp", progress=False)
    write_tiny_checkpoint(tmp_path, small(drafter="mtp", mtp=0))
    with pytest.raises(CheckpointError, match=r"holds no drafter, asked for: a DSpark drafter$"):
        load_model(tmp_path, drafts="dspark", progress=False)
    with pytest.raises(ValueError, match=r"drafts must be auto, off, mtp, dspark, got 'eagle'"):
        load_model(tmp_path, drafts="eagle", progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("declared", [None, 0, 1, 3, 7])
def test_the_declared_number_of_mtp_layers_says_nothing(
    dspark: Path, tmp_path: Path, declared: int | None
) -> None:
    directory = changed(dspark, tmp_path, num_nextn_predict_layers=declared)
    model = load_model(directory, progress=False)
    assert model.dspark is not None
    assert len(model.dspark.stages) == 3


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_as_many_stages_as_the_tensors_have(tmp_path: Path, stages: int) -> None:
    write_tiny_checkpoint(tmp_path / "a", small(stages=stages))
    for ratios in ([*SMALL.ratios, *[0] * stages], list(SMALL.ratios)):
        directory = changed(tmp_path / "a", tmp_path / "b", compress_ratios=ratios)
        model = load_model(directory, progress=False)
        assert model.dspark is not None
        assert len(model.dspark.stages) == stages
        assert len(model.layer_specs) == 3 + stages


def test_a_confidence_head_may_be_missing(dspark: Path, tmp_path: Path) -> None:
    directory = changed(
        dspark, tmp_path, lambda t: t.pop("mtp.2.confidence_head.proj.weight") is None
    )
    model = load_model(directory, progress=False)
    assert model.dspark is not None
    assert model.dspark.markov.confidence is None


def test_every_other_tensor_is_needed(dspark: Path) -> None:
    """Taking away any one of them is noticed, and named; each is read by one module only."""
    checkpoint = Checkpoint.open(dspark)
    config = present_config(checkpoint, ModelConfig.from_dir(dspark))
    names = [n for n in checkpoint if n.startswith("mtp.") and ".experts.1." not in n]
    assert len(names) > 100
    for name in names:
        info = checkpoint._tensors.pop(name)
        assert name in verify(checkpoint, config).missing
        checkpoint._tensors[name] = info
    assert verify(checkpoint, config).ok


def test_every_tensor_is_read_once(dspark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    tensor = Checkpoint.tensor
    before = Checkpoint.open(dspark)
    config = present_config(before, ModelConfig.from_dir(dspark))
    assert verify(before, config).ok

    def counted(self: Checkpoint, name: str, device: Any = "cpu") -> torch.Tensor:
        read[name] += 1
        return tensor(self, name, device)

    monkeypatch.setattr("anymla.model.loading.require_loadable", lambda *_: None)
    monkeypatch.setattr(Checkpoint, "tensor", counted)
    load_model(dspark, progress=False)
    assert read == Counter(dict.fromkeys(before, 1))
    read.clear()
    load_model(dspark, drafts="off", progress=False)
    assert not [name for name in read if name.startswith("mtp.")]


def drop(prefix: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def add(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(2)})


NO_FIELDS = dict.fromkeys(
    ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
)
REFUSED: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "an unknown tensor": (
        add("mtp.1.ffn.gate.tree_bias"),
        {},
        r"unexpected mtp.1.ffn.gate.tree_bias$",
    ),
    "an unknown part": (
        add("mtp.2.tree_head.proj.weight"),
        {},
        r"unexpected mtp.2.tree_head.proj.weight$",
    ),
    "a tensor without a stage": (
        add("mtp.proj.weight"),
        {},
        r"stages must be mtp.0 to mtp.3, the files have mtp.0, mtp.1, mtp.2, mtp.proj$",
    ),
    "two stages": (
        drop("mtp.1."),
        {},
        r"stages must be mtp.0 to mtp.1, the files have mtp.0, mtp.2$",
    ),
    "the last stage": (
        drop("mtp.2."),
        {},
        r"the files hold 2 draft stages, compress_ratios in config.json has 3$",
    ),
    "a stage too many": (
        add("mtp.3.attn_norm.weight"),
        {},
        r"the files hold 4 draft stages, compress_ratios in config.json has 3$",
    ),
    "extras at another stage": (
        rename("mtp.2.markov_head", "mtp.1.markov_head"),
        {},
        r"missing mtp.2.markov_head.markov_w1.weight, mtp.2.markov_head.markov_w2.weight; "
        r"unexpected mtp.1.markov_head.markov_w1.weight, mtp.1.markov_head.markov_w2.weight$",
    ),
    "V4.1's names": (
        rename("mtp.2.markov_head.markov_w1", "mtp.2.markov_head.embed"),
        {},
        r"missing mtp.2.markov_head.markov_w1.weight; unexpected mtp.2.markov_head.embed.weight$",
    ),
    "no fields": (
        lambda t: None,
        NO_FIELDS,
        r"mtp.0.main_norm.weight belongs to a DSpark drafter, but config.json has no "
        r"dspark_block_size; it loads without drafts only$",
    ),
    "another rank": (
        lambda t: None,
        {"dspark_markov_rank": 32},
        r"mtp.2.markov_head.markov_w1.weight is BF16 \[272, 24\], must be .* \[272, 32\]",
    ),
    "fewer taps": (
        lambda t: None,
        {"dspark_target_layer_ids": [1, 2]},
        r"mtp.0.main_proj.weight is F8_E4M3 \[160, 480\], must be F8_E4M3 \[160, 320\]",
    ),
    "a scale": (
        lambda t: t.pop("mtp.0.main_proj.scale"),
        {},
        r"missing mtp.0.main_proj.scale$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_built(
    case: str, dspark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, config, message = REFUSED[case]
    directory = changed(dspark, tmp_path, change, **config)
    with monkeypatch.context() as patched:
        patched.setattr("anymla.model.load.Builder", None)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_model(directory, progress=False)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    # The backbone is whole, and needs none of it.
    assert load_model(directory, drafts="off", progress=False).dspark is None


def test_mtp_tensors_under_a_dspark_configuration(dspark: Path, mtp: Path, tmp_path: Path) -> None:
    fields = json.loads((dspark / "config.json").read_text())
    directory = changed(mtp, tmp_path, **{name: fields[name] for name in NO_FIELDS})
    with pytest.raises(CheckpointError, match=r"mtp.0.\w+.weight belongs to MTP layers, but .* a "):
        load_model(directory, progress=False)
    assert len(load_model(directory, drafts="off", progress=False).layers) == 3


def test_without_looking_at_the_drafter(dspark: Path, tmp_path: Path) -> None:
    checkpoint, config = choose_drafts(Checkpoint.open(dspark), ModelConfig.from_dir(dspark), "off")
    assert not [name for name in checkpoint if name.startswith("mtp.")]
    assert checkpoint.nbytes < Checkpoint.open(dspark).nbytes
    assert config == ModelConfig.from_dir(dspark).without_drafts()


def flash(*drop: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (FLASH_0731 | changes).items() if k not in drop}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (flash("dspark_noise_token_id"), r"dspark_noise_token_id is missing"),
        (flash("dspark_target_layer_ids"), r"dspark_target_layer_ids is missing"),
        (flash("dspark_markov_rank"), r"dspark_markov_rank is missing"),
        (flash(dspark_block_size=0), r"dspark_block_size is 0, supported: an integer >= 1"),
        (flash(dspark_block_size=10**6), r"dspark_block_size is 1000000, supported: .* <= 1024"),
        (flash(dspark_markov_rank="256"), r"dspark_markov_rank is '256', supported: an integer"),
        (
            flash(dspark_noise_token_id=129280),
            r"dspark_noise_token_id is 129280, supported: below vocab_size = 129280",
        ),
        (
            flash(dspark_target_layer_ids=[41, 42, 43]),
            r"dspark_target_layer_ids is \[41, 42, 43\], supported: different layers from 0 to 42",
        ),
        (flash(dspark_target_layer_ids=[]), r"dspark_target_layer_ids is \[\], supported: diff"),
        (flash(dspark_target_layer_ids=[1, 1]), r"dspark_target_layer_ids is \[1, 1\], supp"),
        (flash(dspark_n_routed_experts=0), r"dspark_n_routed_experts is 0, supported: an int"),
        (
            flash(dspark_n_routed_experts=4, dspark_num_experts_per_tok=6),
            r"dspark_num_experts_per_tok is 6, supported: at most dspark_n_routed_experts = 4",
        ),
        (
            flash(compress_ratios=[*FLASH_0731["compress_ratios"][:43], 0, 4, 0]),
            r"compress_ratios is .*, supported: 0 for draft layers",
        ),
        (
            flash(compress_ratios=[*FLASH_0731["compress_ratios"], *[0] * 70]),
            r"compress_ratios is '116 entries', supported: at most 107 entries",
        ),
    ],
)
def test_fields_that_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: {message}") as caught:
        ModelConfig.from_dict(values)
    assert "\n" not in str(caught.value)
    # Who does not draft does not read them.
    backbone = ModelConfig.from_dict(values, drafts=False)
    assert backbone == ModelConfig.from_dict(FLASH_0731).without_drafts()


def test_fields_of_a_drafter_that_nobody_asked_for(dspark: Path, mtp: Path, tmp_path: Path) -> None:
    for number, (source, broken) in enumerate(
        [
            (dspark, {"dspark_markov_rank": "many"}),
            (dspark, {"dspark_target_layer_ids": None}),
            (dspark, {"compress_ratios": [0, 4, 128, 0, 4, 0]}),
            (mtp, {"num_nextn_predict_layers": -1}),
        ]
    ):
        directory = changed(source, tmp_path / str(number), **broken)
        with pytest.raises(ConfigError):
            load_model(directory, progress=False)
        model = load_model(directory, drafts="off", progress=False)
        assert model.config == ModelConfig.from_dir(source).without_drafts()
        assert threads.weights_per_token(directory) == threads.weights_per_token(source)


def test_transformers_spelling_leaves_the_stages_to_the_tensors(
    dspark: Path, tmp_path: Path
) -> None:
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    directory = changed(
        dspark,
        tmp_path,
        compress_ratios=None,
        layer_types=types,
        compress_rates={types[1]: 4, types[2]: 128},
    )
    model = load_model(directory, progress=False)
    assert model.dspark is not None
    assert model.config == load_model(dspark, progress=False).config
