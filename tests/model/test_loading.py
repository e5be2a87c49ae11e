import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, Tensors, changed

from anymla.model.checkpoint import Checkpoint, CheckpointError
from anymla.model.config import ModelConfig
from anymla.model.drafts import present_config
from anymla.model.load import load_model
from anymla.model.loading import Weights, exponent_bytes, load_weights
from anymla.model.verify import verify
from anymla.ops.memory import NotEnoughMemory
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

FP4 = "layers.1.ffn.experts.0.w1"
FP8 = "layers.1.attn.wq_a"


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp4")
    write_tiny_checkpoint(directory, SMALL)
    return directory


def small(**changes: Any) -> TinyOptions:
    return TinyOptions(**{**vars(SMALL), **changes})


def weights_of(directory: Path) -> Weights:
    config = ModelConfig.from_dir(directory)
    return load_weights(Checkpoint.open(directory), config, progress=False)


def test_linears_come_as_they_are_stored(fp4: Path) -> None:
    weights = weights_of(fp4)
    fp8 = weights.linear(FP8)
    assert (fp8.kind, fp8.weight.dtype) == ("fp8", torch.uint8)
    assert fp8.scale is not None
    assert fp8.scale.dtype == torch.uint8
    mxfp4 = weights.linear(FP4)
    assert (mxfp4.kind, mxfp4.weight.dtype, list(mxfp4.weight.shape)) == (
        "mxfp4",
        torch.uint8,
        [96, 80],
    )
    assert mxfp4.scale is not None
    assert list(mxfp4.scale.shape) == [96, 5]
    plain = weights.linear("layers.1.attn.indexer.weights_proj")
    assert (plain.kind, plain.weight.dtype, plain.scale) == ("plain", torch.bfloat16, None)
    # In place: still the mapped file.
    codes = weights.checkpoint.tensor(f"{FP8}.weight")
    assert codes.data_ptr() == fp8.weight.data_ptr()


@pytest.mark.parametrize(
    "options",
    [
        small(),
        small(weights="fp8"),
        small(weights="fp8", scale_format="fp32", shards=3),
        small(nvfp4_attention=True),
        small(weights="bf16", nvfp4_attention=True),
    ],
    ids=["fp4", "fp8", "fp8-fp32-scales", "fp4-nvfp4", "bf16-nvfp4"],
)
def test_decoded_linears_equal_the_twin(options: TinyOptions, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "packed", options, twin=tmp_path / "twin")
    packed, twin = weights_of(tmp_path / "packed"), weights_of(tmp_path / "twin")
    kinds = set()
    for name in twin.checkpoint:
        prefix = name.removesuffix(".weight")
        if name not in packed.checkpoint or prefix == name:
            continue
        weight = packed.linear(prefix)
        kinds.add(weight.kind)
        assert torch.equal(weight.dense(torch.float32), twin.tensor(name).float()), name
    assert len(kinds) > 1


def test_float32_scales_stay_float32(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, small(weights="fp8", scale_format="fp32"))
    scale = weights_of(tmp_path).linear(FP8).scale
    assert scale is not None
    assert scale.dtype == torch.float32
    assert bool((torch.frexp(scale).mantissa != 0.5).any())


def test_power_of_two_float32_scales_become_exponent_bytes(fp4: Path, tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors[f"{FP4}.scale"] = tensors[f"{FP4}.scale"].float()

    got = weights_of(changed(fp4, tmp_path, widen)).linear(FP4).scale
    want = weights_of(fp4).linear(FP4).scale
    assert got is not None
    assert want is not None
    assert torch.equal(got, want)


def test_exponent_bytes_are_exact_or_refused() -> None:
    exponents = torch.arange(-126, 128)
    powers = torch.ldexp(torch.ones(len(exponents)), exponents)
    assert exponent_bytes(powers, "s").tolist() == (exponents + 127).tolist()
    with pytest.raises(CheckpointError, match=r"^s holds scales that are not powers of two$"):
        exponent_bytes(torch.tensor([1.0, 1.5]), "s")


def test_tied_head_is_the_embedding(fp4: Path, tmp_path: Path) -> None:
    directory = changed(fp4, tmp_path, lambda t: t.pop("head.weight"), tie_word_embeddings=True)
    weights = weights_of(directory)
    assert torch.equal(weights.tensor("head.weight"), weights.tensor("embed.weight"))


def test_mtp_layers_that_are_declared_but_absent(fp4: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    directory = changed(fp4, tmp_path, drop)
    config = present_config(Checkpoint.open(directory), ModelConfig.from_dir(directory))
    assert config.num_nextn_predict_layers == 0
    assert verify(Checkpoint.open(directory), config).ok
    assert len(load_model(directory, progress=False).drafts) == 0


def test_a_model_that_transformers_saved(tmp_path: Path) -> None:
    from transformers import DeepseekV4ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write_tiny_checkpoint(tmp_path / "ours", small(weights="bf16", mtp=0))
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = weights_of(tmp_path / "ours"), weights_of(tmp_path / "theirs")
    assert set(ours.checkpoint) == set(theirs.checkpoint)
    for name in ours.checkpoint:
        assert torch.equal(ours.tensor(name).double(), theirs.tensor(name).double()), name
    assert load_model(tmp_path / "theirs", progress=False).config.num_hidden_layers == 3


def test_progress_bar_counts_every_byte(fp4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(fp4)
    assert "loading: 100%" in capsys.readouterr().err
    load_model(fp4, progress=False)
    assert capsys.readouterr().err == ""


def replace(name: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value})


def mixed_experts(tensors: Tensors) -> None:
    for leaf in ("w1", "w2", "w3"):
        rows, columns = (160, 96) if leaf == "w2" else (96, 160)
        name = f"layers.0.ffn.experts.3.{leaf}"
        tensors[f"{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        del tensors[f"{name}.scale"]


def scaled(name: str, factor: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].float() * factor

    return change


REFUSED: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "missing": (lambda t: t.pop(f"{FP8}.scale"), {}, rf"missing {FP8}.scale$"),
    "missing three of many": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.2.attn.")],
        {},
        r"missing layers.2.attn.\S+, layers.2.attn.\S+, layers.2.attn.\S+ and \d+ more$",
    ),
    "unexpected": (
        replace("layers.0.attn.k_norm.weight", torch.ones(2)),
        {},
        r"unexpected layers.0.attn.k_norm.weight$",
    ),
    "shape": (
        replace("norm.weight", torch.ones(161)),
        {},
        r"norm.weight is F32 \[161\], must be BF16 or F16 or F32 \[160\]$",
    ),
    "dtype": (
        replace("norm.weight", torch.ones(160, dtype=torch.int64)),
        {},
        r"norm.weight is I64 \[160\], must be BF16 or F16 or F32 \[160\]$",
    ),
    "scale shape": (
        replace(f"{FP8}.scale", torch.ones(1, 3)),
        {},
        rf"{FP8}.scale is F32 \[1, 3\], must be F8_E8M0 or U8 or F32 \[1, 2\]$",
    ),
    "compressor in fp8": (
        replace(
            "layers.1.attn.compressor.wkv.weight",
            torch.zeros(1024, 160, dtype=torch.uint8).view(torch.float8_e4m3fn),
        ),
        {},
        r"layers.1.attn.compressor.wkv is stored as fp8, can read plain or nvfp4",
    ),
    "config denies it": (
        lambda t: None,
        {"quantization_config": None},
        r"layers.0.attn.wq_a is stored as fp8, but config has no quantization_config, ",
    ),
    "other experts": (
        lambda t: None,
        {"expert_dtype": "fp8"},
        r"layers.0.ffn.experts.0.w1 is stored as mxfp4, but config says expert_dtype fp8, ",
    ),
    "mixed experts": (
        mixed_experts,
        {"expert_dtype": None},
        r"layers.0.ffn.experts mixes mxfp4 and plain, must be of one kind$",
    ),
    "scale would be truncated": (
        scaled(f"{FP4}.scale", 1.5),
        {},
        rf"{FP4}.scale holds scales that are not powers of two, as MXFP4 needs$",
    ),
    "negative scale": (
        scaled(f"{FP8}.scale", -1.0),
        {},
        rf"{FP8}.scale holds scales that are not positive numbers$",
    ),
    "infinite scale": (
        scaled(f"{FP8}.scale", float("inf")),
        {},
        rf"{FP8}.scale holds scales that are not positive numbers$",
    ),
    "expert out of range": (
        lambda t: t["layers.0.ffn.gate.tid2eid"].add_(3),
        {},
        r"layers.0.ffn.gate.tid2eid names experts outside 0..3$",
    ),
    "second mtp layer": (
        lambda t: None,
        {"num_nextn_predict_layers": 2, "compress_ratios": [0, 4, 128, 0, 0]},
        r"missing mtp.1.\S+, mtp.1.\S+, mtp.1.\S+ and \d+ more$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_built(
    case: str, fp4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, config, message = REFUSED[case]
    directory = changed(fp4, tmp_path, change, **config)
    monkeypatch.setattr("anymla.model.load.Builder", None)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(directory, progress=False)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_single_tensor_is_needed(fp4: Path) -> None:
    """Taking away any one of them is noticed, and named."""
    checkpoint = Checkpoint.open(fp4)
    config = ModelConfig.from_dir(fp4)
    for name in [name for name in checkpoint if ".experts.1." not in name]:
        info = checkpoint._tensors.pop(name)
        report = verify(checkpoint, config)
        assert not report.ok
        assert name in report.missing
        checkpoint._tensors[name] = info
    assert verify(checkpoint, config).ok


@pytest.mark.parametrize("layers", [1, 1024])
def test_a_configuration_of_another_size(fp4: Path, tmp_path: Path, layers: int) -> None:
    """Naming what is missing would take longer than anybody waits."""
    ratios = [0] * (layers + 1)
    directory = changed(
        fp4, tmp_path, n_routed_experts=65536, num_hidden_layers=layers, compress_ratios=ratios
    )
    count = (layers + 1) * 65536 * 3
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=rf"config needs at least {count} tensors, the files"):
        load_model(directory, progress=False)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.1.attn.attn_sink", torch.nan),
        ("layers.1.attn.attn_sink", torch.inf),
        ("layers.1.attn.compressor.ape", torch.nan),
        ("layers.1.ffn.gate.bias", -torch.inf),
        ("layers.0.hc_attn_fn", torch.nan),
        ("norm.weight", torch.inf),
        ("embed.weight", torch.nan),
    ],
)
def test_values_that_are_no_numbers(fp4: Path, tmp_path: Path, name: str, value: float) -> None:
    directory = changed(fp4, tmp_path, lambda t: t[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or an infinity$"):
        load_model(directory, progress=False)


def test_a_sink_that_takes_no_share(fp4: Path, tmp_path: Path) -> None:
    name = "layers.1.attn.attn_sink"
    directory = changed(fp4, tmp_path, lambda t: t[name].fill_(-torch.inf))
    assert verify(Checkpoint.open(directory), ModelConfig.from_dir(directory)).ok


def test_copies_are_reckoned_before_they_are_made(
    fp4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(fp4)
    plain = {
        name: info
        for name, info in checkpoint.items()
        if info.dtype in ("BF16", "F32") and ".experts." not in name
    }
    copied = sum(4 * math.prod(info.shape) for info in plain.values() if info.dtype == "BF16")
    has: list[int] = [copied]
    monkeypatch.setattr("anymla.ops.memory.host_bytes", lambda: has[0])
    load_model(fp4, dtype=torch.float32, progress=False)
    has[0] -= 1
    with pytest.raises(NotEnoughMemory, match=r"loading .*fp4.* \(weights in another dtype: "):
        load_model(fp4, dtype=torch.float32, progress=False)
    # Weights that stay in the mapped file take nothing.
    load_model(fp4, progress=False)


def test_a_device_takes_the_whole_checkpoint(fp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = Checkpoint.open(fp4).nbytes - 1
    monkeypatch.setattr("anymla.ops.memory.available_bytes", lambda device: has)
    with pytest.raises(NotEnoughMemory, match=r"of memory on meta \(weights: "):
        load_model(fp4, device="meta", progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_float32_holds_is_not_rounded(fp4: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Router bias, sinks, position embeddings and gates: bfloat16 would move choices and shares."""
    names = {
        "layers.1.ffn.gate.bias": lambda model: model.layers[1].ffn.router.bias,
        "layers.1.attn.attn_sink": lambda model: model.layers[1].attention.heads.sink,
        "layers.1.attn.compressor.ape": lambda model: model.layers[1].attention.compressor.ape,
        "layers.1.attn.indexer.compressor.ape": (
            lambda model: model.layers[1].attention.indexer.compressor.ape
        ),
        "layers.1.hc_attn_fn": lambda model: model.layers[1].attention_site.fn,
        "layers.1.hc_attn_base": lambda model: model.layers[1].attention_site.base,
        "layers.1.hc_attn_scale": lambda model: model.layers[1].attention_site.scale,
        "hc_head_fn": lambda model: model.head.fn,
    }
    stored: Tensors = {}

    def spread(tensors: Tensors) -> None:
        for seed, name in enumerate(names):
            generator = torch.Generator().manual_seed(seed)
            stored[name] = tensors[name] = torch.rand(
                tensors[name].shape, generator=generator, dtype=torch.float32
            )
            assert not torch.equal(stored[name], stored[name].bfloat16().float()), name

    model = load_model(changed(fp4, tmp_path, spread), dtype=dtype, progress=False)
    for name, find in names.items():
        kept = find(model)
        assert kept.dtype == torch.float32, name
        assert torch.equal(kept, stored[name]), name
