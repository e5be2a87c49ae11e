"""What a tiny checkpoint shall be, and its configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.model.config import ModelConfig
from anymla.model.schema import expected_linears, expected_plain
from anymla.testing.tiny_tokenizer import MIN_VOCAB

WEIGHTS = ("bf16", "fp8", "fp4")
SCALE_FORMATS = ("ue8m0", "fp32")
DRAFTERS = ("mtp", "dspark")
MARK = "anymla_tiny"
_ORIGINAL_CONTEXT = 65536
_TAPS = 3
# What a checkpoint for demonstrations and tests may ask of a machine: it is made in memory.
MAX_VOCAB, MAX_LAYERS, MAX_EXPERTS, MAX_WEIGHTS = 2**20, 512, 2**16, 2**31
MAX_ROPE_FACTOR = 2**31 // _ORIGINAL_CONTEXT  # positions are int32


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
        drafter: "mtp": MTP layers behind them; "dspark": a DSpark drafter, whose context is taken
            behind the last layers, at most three.
        mtp: how many MTP layers.
        stages: layers of the DSpark drafter.
        block: tokens of its block.
        markov_rank: width of its Markov tables.
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
    drafter: str = "mtp"
    mtp: int = 1
    stages: int = 3
    block: int = 5
    markov_rank: int = 32
    vocab: int = MIN_VOCAB
    nvfp4_attention: bool = False
    scale_format: str = "ue8m0"
    shards: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("weights", WEIGHTS),
            ("scale_format", SCALE_FORMATS),
            ("drafter", DRAFTERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if not self.ratios:
            raise ValueError("ratios must name at least one layer")
        if self.vocab < MIN_VOCAB:
            raise ValueError(f"vocab must be at least {MIN_VOCAB}, got {self.vocab}")
        if self.drafter == "dspark" and self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        layers = len(self.ratios) + self.draft_layers
        for name, value, most in (
            ("vocab", self.vocab, MAX_VOCAB),
            ("layers, with those that draft,", layers, MAX_LAYERS),
            ("experts of all layers", self.experts * layers, MAX_EXPERTS),
        ):
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if not 1 <= self.rope_factor <= MAX_ROPE_FACTOR:
            raise ValueError(
                f"rope_factor must be in [1, {MAX_ROPE_FACTOR}], got {self.rope_factor}"
            )
        if self.shards < 1:
            raise ValueError(f"shards must be at least 1, got {self.shards}")
        context = int(_ORIGINAL_CONTEXT * self.rope_factor)
        for name in ("window", "index_topk"):
            if getattr(self, name) > context:
                raise ValueError(
                    f"{name} must be at most the longest position, {context}, "
                    f"got {getattr(self, name)}"
                )
        if self.weights == "fp4":
            self._require_multiples(MXFP4_BLOCK, "FP4 experts", "hidden", "moe_size")
        if self.nvfp4_attention:
            self._require_multiples(NVFP4_BLOCK, "NVFP4", "hidden", "q_lora")
            if self.o_groups * self.o_lora % NVFP4_BLOCK:
                raise ValueError(f"o_groups * o_lora must be a multiple of {NVFP4_BLOCK} for NVFP4")

    @property
    def draft_layers(self) -> int:
        """Layers behind the backbone."""
        return self.stages if self.drafter == "dspark" else self.mtp

    def _require_multiples(self, block: int, purpose: str, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value % block:
                raise ValueError(f"{name} must be a multiple of {block} for {purpose}, got {value}")


def tiny_config(options: TinyOptions) -> dict[str, Any]:
    """The ``config.json``, in DeepSeek's spelling.

    Raises:
        ConfigError: options that no model can have.
        ValueError: more weights than a tiny checkpoint may have, or shards than tensors.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": len(options.ratios),
        # Published DSpark checkpoints say 1 here, whatever they hold.
        "num_nextn_predict_layers": options.mtp if options.drafter == "mtp" else 1,
        "num_attention_heads": options.heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": options.q_lora,
        "o_groups": options.o_groups,
        "o_lora_rank": options.o_lora,
        "sliding_window": options.window,
        "compress_ratios": [*options.ratios, *[0] * options.draft_layers],
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
        MARK: dataclasses.asdict(options),
    }
    if options.drafter == "dspark":
        layers = range(len(options.ratios))
        config |= {
            "dspark_block_size": options.block,
            "dspark_noise_token_id": options.vocab - 1,
            "dspark_target_layer_ids": list(layers[-_TAPS:]),
            "dspark_markov_rank": options.markov_rank,
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
    _check_size(options, ModelConfig.from_dict(config))
    return config


def _check_size(options: TinyOptions, config: ModelConfig) -> None:
    linears, plain = expected_linears(config).values(), expected_plain(config).values()
    weights = sum(each.rows * each.columns for each in linears)
    weights += sum(math.prod(each.shape) for each in plain)
    if weights > MAX_WEIGHTS:
        raise ValueError(
            f"the checkpoint would hold {weights} weights, a tiny one at most {MAX_WEIGHTS}"
        )
    if options.shards > len(linears) + len(plain):
        raise ValueError(f"shards must be at most one for each tensor, got {options.shards}")
