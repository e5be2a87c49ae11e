"""Options of a tiny checkpoint, and the configuration that follows from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.model.config import EngramConfig, ModelConfig
from anymla.model.schema import expected_linears, expected_plain
from anymla.model.token_map import normalised_tokens
from anymla.testing.tiny_tokenizer import CHAT_VOCAB, MIN_VOCAB, tiny_tokenizer

WEIGHTS = ("bf16", "fp8", "fp4", "nvfp4")
SCALE_FORMATS = ("ue8m0", "fp32")
DRAFTERS = ("mtp", "dspark")
MARK = "anymla_tiny"
_ORIGINAL_CONTEXT = 65536
_TAPS = 3
_ENGRAM_PAD = 2
# Limits of a checkpoint for demonstrations and tests, which is made in memory.
MAX_VOCAB, MAX_LAYERS, MAX_EXPERTS, MAX_WEIGHTS = 2**20, 512, 2**16, 2**31
MAX_ROPE_FACTOR = 2**31 // _ORIGINAL_CONTEXT  # positions are int32


def default_ratios(layers: int) -> tuple[int, ...]:
    """Return V4-Flash's pattern in small: one window-only layer, then 4 and 128 in turn."""
    return tuple(0 if i == 0 else (4 if i % 2 else 128) for i in range(layers))


def default_shared_ratios(layers: int) -> tuple[int, ...]:
    """Return V4.1-Flash's pattern in small: a quarter 0, a quarter 2, half 1."""
    quarter = layers // 4
    return (0,) * quarter + (2,) * quarter + (1,) * (layers - 2 * quarter)


@dataclasses.dataclass(frozen=True)
class TinySharing:
    """Layers that others share in a DeepSeek-V4.1, and its memory of n-grams.

    Attributes:
        kv_sources: indices of layers that write entries.
        index_sources: indices of layers that select.
        candidate_source: index of the layer that keeps blocks of entries; -1 for none.
        candidate_blocks: number of blocks that it keeps.
        candidate_block_size: number of entries per block.
        engram_layers: indices of layers that read n-grams; may be empty.
        engram_buckets: least number of rows for each of a layer's hashes.
        engram_heads: number of hashes of an n-gram.
        engram_dim: number of channels of a row.
    """

    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int
    candidate_blocks: int = 2048
    candidate_block_size: int = 8
    engram_layers: tuple[int, ...] = ()
    engram_buckets: int = 500
    engram_heads: int = 2
    engram_dim: int = 32

    @classmethod
    def of(cls, ratios: tuple[int, ...], **changes: Any) -> TinySharing:
        """Return V4.1-Flash's pattern in small.

        The first layer of every ratio writes entries. In the last ratio every second layer after it
        selects, within the blocks that it keeps. One layer in each half reads n-grams.
        """
        kv = tuple(i for i, r in enumerate(ratios) if r and r not in ratios[:i])
        last = kv[-1] if kv else -1
        again = tuple(range(last + 2, len(ratios), 2)) if kv else ()
        half = len(ratios) // 2
        given: dict[str, Any] = {
            "kv_sources": kv,
            "index_sources": kv + again,
            "candidate_source": last,
            "engram_layers": tuple(sorted({min(1, len(ratios) - 1), half})),
        }
        return cls(**(given | changes))


@dataclasses.dataclass(frozen=True)
class TinyOptions:
    """Options of a tiny checkpoint.

    Attributes:
        weights: "fp4": packed FP4 experts, FP8 for the other linear layers, as DeepSeek ships the
            model; "nvfp4": the same with the backbone's experts as NVIDIA ships them; "fp8": the
            experts in FP8, too; "bf16": nothing quantised.
        ratios: compress ratios of the backbone layers.
        drafter: "mtp": MTP layers after them; "dspark": a DSpark drafter, whose context is taken
            from the last layers, at most three.
        mtp: number of MTP layers.
        stages: number of layers of the DSpark drafter.
        block: number of tokens of its block.
        markov_rank: width of its Markov tables.
        draft_experts: number of routed experts of its layers; 0 for as many as in others.
        draft_experts_per_token: number of experts that a token is sent to; 0 for as many as
            elsewhere.
        rope_factor: factor of YaRN; the longest position is 65536 times that.
        nvfp4_attention: True for every linear layer of the attention in NVFP4.
        scale_format: format of FP8 scales, "ue8m0" or "fp32" (then not powers of two).
        shards: number of files that hold the tensors.
        seed: seed of all values.
        sharing: sharing of a DeepSeek-V4.1, which has no layers that route by token id and no MTP
            layers; None for a DeepSeek-V4.
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
    draft_experts: int = 0
    draft_experts_per_token: int = 0
    vocab: int = CHAT_VOCAB
    nvfp4_attention: bool = False
    scale_format: str = "ue8m0"
    shards: int = 1
    seed: int = 0
    sharing: TinySharing | None = None

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
        has_mtp = self.drafter == "mtp" and self.mtp
        if self.sharing is not None and (self.hash_layers or has_mtp):
            raise ValueError("hash_layers and mtp must be 0 for DeepSeek-V4.1")
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
        if self.weights in ("fp4", "nvfp4"):
            self._require_multiples(MXFP4_BLOCK, "FP4 experts", "hidden", "moe_size")
        if self.nvfp4_attention:
            self._require_multiples(NVFP4_BLOCK, "NVFP4", "hidden", "q_lora")
            if self.o_groups * self.o_lora % NVFP4_BLOCK:
                raise ValueError(f"o_groups * o_lora must be a multiple of {NVFP4_BLOCK} for NVFP4")

    @property
    def draft_layers(self) -> int:
        """Number of layers after the backbone."""
        return self.stages if self.drafter == "dspark" else self.mtp

    @property
    def weight_block(self) -> int:
        """Rows and columns of an FP8 weight that share a scale."""
        return FP8_BLOCK if self.sharing is None else MXFP4_BLOCK

    @classmethod
    def shared(cls, **changes: Any) -> TinyOptions:
        """Return a DeepSeek-V4.1; ``sharing`` follows from ``ratios`` unless it is given."""
        given: dict[str, Any] = {
            "ratios": default_shared_ratios(8),
            "hash_layers": 0,
            "mtp": 0,
        } | changes
        given.setdefault("sharing", TinySharing.of(given["ratios"]))
        return cls(**given)

    def _require_multiples(self, block: int, purpose: str, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value % block:
                raise ValueError(f"{name} must be a multiple of {block} for {purpose}, got {value}")


def tiny_config(options: TinyOptions) -> dict[str, Any]:
    """Return the ``config.json``, in DeepSeek's spelling.

    Raises:
        ConfigError: no model can have these options.
        ValueError: there are more weights than a tiny checkpoint may have, or more shards than
            tensors.
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
        MARK: _marked(options),
    }
    if options.drafter == "dspark":
        layers = range(len(options.ratios))
        config |= {
            "dspark_block_size": options.block,
            "dspark_noise_token_id": options.vocab - 1,
            "dspark_target_layer_ids": list(layers[-_TAPS:]),
            "dspark_markov_rank": options.markov_rank,
        }
        for name, value in (
            ("dspark_n_routed_experts", options.draft_experts),
            ("dspark_num_experts_per_tok", options.draft_experts_per_token),
        ):
            config |= {name: value} if value else {}
    if options.weights != "bf16" or options.nvfp4_attention:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0" if options.scale_format == "ue8m0" else "float32",
            "weight_block_size": [options.weight_block, options.weight_block],
            "activation_scheme": "dynamic",
        }
    if options.nvfp4_attention:
        config["quantization_config"] |= {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
        }
    if options.weights == "nvfp4":
        experts = [f"layers.{layer}.ffn.experts" for layer in range(len(options.ratios))]
        config["quantization_config"] |= {
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "group_size": NVFP4_BLOCK,
            "kv_cache_quant_algo": None,
            "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
            "quantized_layers": {
                name: {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK} for name in experts
            },
        }
    if options.weights != "bf16":
        config["expert_dtype"] = "fp8" if options.weights == "fp8" else "fp4"
    if options.sharing is not None:
        config = _shared_config(config, options, options.sharing)
    _check_size(options, ModelConfig.from_dict(config))
    return config


def _marked(options: TinyOptions) -> dict[str, Any]:
    """Return the options without those of another model."""
    marked = dataclasses.asdict(options)
    if options.sharing is None:
        del marked["sharing"]
    return marked


def _shared_config(
    config: dict[str, Any], options: TinyOptions, sharing: TinySharing
) -> dict[str, Any]:
    """Return the ``config.json`` of a DeepSeek-V4.1, whose text model is nested."""
    outer = ("quantization_config", "expert_dtype", "torch_dtype", "bos_token_id", "eos_token_id")
    kept = {name: config.pop(name) for name in (*outer, MARK) if name in config}
    del config["architectures"], config["num_hash_layers"]
    config["num_nextn_predict_layers"] = options.draft_layers
    config |= {
        "model_type": "deepseek_v41_text",
        "rms_norm_eps": 1e-20,
        "kv_source_layer_ids": list(sharing.kv_sources),
        "index_source_layer_ids": list(sharing.index_sources),
        "candidate_source_layer_id": sharing.candidate_source,
        "candidate_topk_blocks": sharing.candidate_blocks,
        "candidate_block_size": sharing.candidate_block_size,
    }
    if sharing.engram_layers:
        tokens = normalised_tokens(tiny_tokenizer(options.vocab), options.vocab)
        engram = EngramConfig(
            layer_ids=sharing.engram_layers,
            rows=(),
            max_ngram=4,
            buckets=sharing.engram_buckets,
            heads=sharing.engram_heads,
            head_dim=sharing.engram_dim,
            pad_token=_ENGRAM_PAD,
            tokens=max(tokens) + 1,
        )
        config |= {
            "engram_layer_ids": list(engram.layer_ids),
            "engram_num_embeddings": list(engram.filled_rows),
            "engram_max_ngram_size": engram.max_ngram,
            "engram_vocab_size": engram.buckets,
            "engram_n_heads": engram.heads,
            "engram_head_dim": engram.head_dim,
            "engram_pad_token_id": engram.pad_token,
            "engram_compressed_vocab_size": engram.tokens,
        }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": config,
        **kept,
    }


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
