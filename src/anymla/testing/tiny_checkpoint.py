"""A small random DeepSeek-V4 in DeepSeek's own layout, for demonstrations and tests.

Head dim, rotary dim, window, indexer and streams have their real sizes; everything else is small.
The same options give the same bytes. ``transformers`` and vLLM read the result as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.model.checkpoint import INDEX_FILE, SINGLE_FILE
from anymla.model.config import ModelConfig
from anymla.model.schema import LinearShape, expected_linears, expected_plain
from anymla.testing.tiny_noise import Noise
from anymla.testing.tiny_storage import (
    Stored,
    store_fp8,
    store_mxfp4,
    store_nvfp4,
    store_plain,
)
from anymla.testing.tiny_tokenizer import MIN_VOCAB, write_tokenizer
from anymla.testing.tiny_weights import linear_values, plain_values

WEIGHTS = ("bf16", "fp8", "fp4")
SCALE_FORMATS = ("ue8m0", "fp32")
_MARK = "anymla_tiny"
_ORIGINAL_CONTEXT = 65536


def default_ratios(layers: int) -> tuple[int, ...]:
    """DeepSeek-V4-Flash's pattern in small: one window-only layer, then 4 and 128 in turn."""
    return tuple(0 if i == 0 else (4 if i % 2 else 128) for i in range(layers))


@dataclasses.dataclass(frozen=True)
class TinyOptions:
    """What to write.

    Attributes:
        weights: "fp4": packed FP4 experts, FP8 for the other linear layers, as DeepSeek ships the
            model; "fp8": the experts too; "bf16": nothing quantised.
        ratios: compress ratios of the backbone layers.
        mtp: draft layers behind them.
        rope_factor: YaRN's factor; the longest position is 65536 times that.
        nvfp4_attention: every linear layer of the attention in NVFP4.
        scale_format: of FP8 scales, "ue8m0" or "fp32" (then not powers of two).
        shards: files the tensors are spread over.
        seed: of all values.
    """

    weights: str = "fp4"
    ratios: tuple[int, ...] = default_ratios(4)
    hidden: int = 256
    heads: int = 8
    o_groups: int = 2
    o_lora: int = 128
    q_lora: int = 128
    index_topk: int = 512
    index_heads: int = 64
    experts: int = 64
    experts_per_token: int = 6
    moe_size: int = 128
    hash_layers: int = 1
    window: int = 128
    rope_factor: float = 16.0
    mtp: int = 1
    vocab: int = MIN_VOCAB
    nvfp4_attention: bool = False
    scale_format: str = "ue8m0"
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("weights", WEIGHTS), ("scale_format", SCALE_FORMATS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if not self.ratios:
            raise ValueError("ratios must name at least one layer")
        if self.vocab < MIN_VOCAB:
            raise ValueError(f"vocab must be at least {MIN_VOCAB}, got {self.vocab}")
        if self.shards < 1:
            raise ValueError(f"shards must be at least 1, got {self.shards}")
        if self.weights == "fp4":
            self._require_multiples(MXFP4_BLOCK, "FP4 experts", "hidden", "moe_size")
        if self.nvfp4_attention:
            self._require_multiples(NVFP4_BLOCK, "NVFP4", "hidden", "q_lora")
            if self.o_groups * self.o_lora % NVFP4_BLOCK:
                raise ValueError(f"o_groups * o_lora must be a multiple of {NVFP4_BLOCK} for NVFP4")

    def _require_multiples(self, block: int, purpose: str, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value % block:
                raise ValueError(f"{name} must be a multiple of {block} for {purpose}, got {value}")


def tiny_config(options: TinyOptions) -> dict[str, Any]:
    """The ``config.json``, in DeepSeek's spelling.

    Raises:
        ConfigError: options that no model can have.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": len(options.ratios),
        "num_nextn_predict_layers": options.mtp,
        "num_attention_heads": options.heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": options.q_lora,
        "o_groups": options.o_groups,
        "o_lora_rank": options.o_lora,
        "sliding_window": options.window,
        "compress_ratios": [*options.ratios, *[0] * options.mtp],
        "index_n_heads": options.index_heads,
        "index_head_dim": 128,
        "index_topk": options.index_topk,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": options.rope_factor,
            "original_max_position_embeddings": _ORIGINAL_CONTEXT,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": int(_ORIGINAL_CONTEXT * options.rope_factor),
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": options.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": options.experts_per_token,
        "moe_intermediate_size": options.moe_size,
        "num_hash_layers": options.hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        # Lower than the real model's 10, so that random activations reach it.
        "swiglu_limit": 3.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        _MARK: dataclasses.asdict(options),
    }
    if options.weights != "bf16" or options.nvfp4_attention:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0" if options.scale_format == "ue8m0" else "float32",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "activation_scheme": "dynamic",
        }
    if options.nvfp4_attention:
        config["quantization_config"] |= {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
        }
    if options.weights != "bf16":
        config["expert_dtype"] = options.weights
    ModelConfig.from_dict(config)
    return config


def write_tiny_checkpoint(
    directory: str | Path, options: TinyOptions | None = None, *, twin: str | Path | None = None
) -> None:
    """Write a checkpoint, and if asked its unquantised twin.

    Args:
        directory: where; created. An earlier tiny checkpoint there is replaced.
        options: what; the defaults if None.
        twin: where a bfloat16 checkpoint goes that holds exactly the dequantised values.

    Raises:
        ValueError: options that no model can have, or a directory that holds something else.
    """
    options = options or TinyOptions()
    config = tiny_config(options)
    targets = [Path(directory)] if twin is None else [Path(directory), Path(twin)]
    if len({target.resolve() for target in targets}) < len(targets):
        raise ValueError(f"{directory}: the twin needs a directory of its own")
    for target in targets:
        _prepare(target)
    with _one_thread():
        stored, values = _tensors(
            options, ModelConfig.from_dict(config), keep_values=twin is not None
        )
    _write(targets[0], config, stored, options.shards)
    if twin is not None:
        plain = {
            k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")
        }
        _write(targets[1], plain, values, options.shards)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small tensors gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tensors(
    options: TinyOptions, config: ModelConfig, *, keep_values: bool
) -> tuple[Stored, dict[str, Tensor]]:
    """All tensors as stored, and, for a twin, with linear layers dequantised."""
    noise = Noise(options.seed)
    stored: Stored = {}
    values: dict[str, Tensor] = {}
    for name, expected in expected_plain(config).items():
        if name.endswith(".tid2eid"):
            rows, count = expected.shape
            tensor = noise.distinct(name, rows, count, config.n_routed_experts)
        else:
            tensor = plain_values(noise, name, expected.shape)
            tensor = tensor if _is_float32(name) else tensor.bfloat16()
        stored[name] = values[name] = tensor
    for prefix, shape in expected_linears(config).items():
        weight = linear_values(noise, prefix, shape.rows, shape.columns)
        tensors, value = _store(options, prefix, shape, weight)
        stored |= tensors
        if keep_values:
            values[f"{prefix}.weight"] = value
    return stored, values


def _store(
    options: TinyOptions, prefix: str, shape: LinearShape, weight: Tensor
) -> tuple[Stored, Tensor]:
    """Store one linear layer in the kind that the options mean for it."""
    if options.nvfp4_attention and "nvfp4" in shape.kinds:
        return store_nvfp4(prefix, weight)
    if options.weights == "bf16" or "fp8" not in shape.kinds:
        return store_plain(prefix, weight)
    if options.weights == "fp4" and ".ffn.experts." in prefix:
        return store_mxfp4(prefix, weight)
    return store_fp8(prefix, weight, options.scale_format)


def _is_float32(name: str) -> bool:
    """Whether DeepSeek stores this tensor in float32; the others are bfloat16."""
    leaf = name.rpartition(".")[2]
    return leaf in ("attn_sink", "ape", "bias") or leaf.startswith("hc_")


def _prepare(directory: Path) -> None:
    """Create the directory, or empty it of an earlier tiny checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    present = list(directory.iterdir())
    if not present:
        return
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        replaceable = _MARK in config
    except (OSError, ValueError, TypeError):
        replaceable = False
    if not replaceable:
        raise ValueError(f"{directory}: is not empty and holds no tiny checkpoint to replace")
    for path in [*directory.glob("*.safetensors"), directory / INDEX_FILE]:
        path.unlink(missing_ok=True)


def _write(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int
) -> None:
    # The configuration first: it marks a directory that was left half written as replaceable.
    text = json.dumps(config, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(contiguous, directory / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(contiguous)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file(
            {name: contiguous[name] for name in part}, directory / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in contiguous.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
