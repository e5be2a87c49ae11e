"""The hyperparameters of a DeepSeek-V4 or V4.1 model, read from its ``config.json``.

Two spellings are in use and give the same ``ModelConfig``: DeepSeek's own (``compress_ratios``,
``num_hash_layers``, ``qk_rope_head_dim``, ``rope_scaling``) and that of transformers 5
(``layer_types`` with ``compress_rates``, ``mlp_layer_types``, ``partial_rotary_factor``, flat or
nested ``rope_parameters``). V4.1 nests the text model's fields in ``text_config``, and DeepSeek's
inference code has names of its own for them; see ``config_family``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anymla.formats.foreign_files import why_no_checkpoint
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout
from anymla.formats.records import SplitFp8Layout
from anymla.formats.untrusted import Refused, read_object
from anymla.model.config_dspark import (
    MOST_DRAFT_LAYERS,
    MOST_EXPERTS,
    DSparkConfig,
    dspark_config,
)
from anymla.model.config_engram import EngramConfig, engram_config
from anymla.model.config_family import FAMILIES, Family, family_of, flat_fields
from anymla.model.config_fields import ConfigError, Fields, unsupported
from anymla.model.config_schedule import (
    SELECTED_RATIO,
    hash_layers,
    layer_ratios,
    rope_tables,
)
from anymla.model.config_sources import Sources, listed_sources, own_sources
from anymla.ops.norm_rope.rope_tables import YarnScaling

__all__ = ["ConfigError", "DSparkConfig", "EngramConfig", "ModelConfig", "Quantization"]

EXPERT_DTYPES = ("fp4", "fp8", "bf16")

# Limits far above any model. Below them, the parts of a configuration can be enumerated: every
# layer and expert has tensors of its own, and every iteration is a pass.
MOST_LAYERS = 1024
_MOST_STREAMS = 64
_MOST_ITERATIONS = 1000

_MOST_BYTES = 16 << 20
_MANIFEST = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantisation that the checkpoint declares; the files say which tensors are quantised.

    Attributes:
        method: "fp8", or "modelopt" for checkpoints that NVIDIA's Model Optimizer wrote.
        block: rows and columns of a weight that share a scale.
        scale_fmt: "ue8m0" or "fp32". Scales of weights are read as stored; scales of activations
            are powers of two with either.
        activation_scheme: always "dynamic": FP8 and MXFP4 linears quantise their input row by row.
        experts: "NVFP4" or "MXFP4" if the file declares it for the backbone's experts, else None.
    """

    method: str
    block: tuple[int, int]
    scale_fmt: str
    activation_scheme: str
    experts: str | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters, under the names of ``config.json``.

    Attributes that differ from the file:
        num_nextn_predict_layers: number of MTP layers; 0 with a DSpark drafter, which has none.
        compress_ratios: one per backbone layer, then one per draft layer; 0 means window only.
        dspark: configuration of the DSpark drafter, or None.
        family: mathematics that the model's type implies.
        sources: layers that compress and select.
        engram: configuration of the memory of n-grams, or None.
        yarn: scaling of the rotary table of layers that compress, or None.
        swiglu_limit: clamp of SwiGLU's inputs; infinity if the file says 0, which means no limit.
        eos_token_ids: ids of all tokens that end a text.
        image_token_ids: ids that stand for an image in a prompt, or its pieces.
        quantization: declared quantisation; None for an unquantised checkpoint.
        expert_dtype: "fp4", "fp8", "bf16", or None if the file does not say.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    image_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    quantization: Quantization | None
    expert_dtype: str | None
    dspark: DSparkConfig | None
    family: Family
    sources: Sources
    engram: EngramConfig | None

    @property
    def backbone_ratios(self) -> tuple[int, ...]:
        """Compress ratios of the backbone layers."""
        return self.compress_ratios[: self.num_hidden_layers]

    def experts_of(self, role: str) -> tuple[int, int]:
        """Return a layer's number of routed experts, and how many of them a token is sent to."""
        if role == "dspark" and self.dspark is not None:
            return self.dspark.experts, self.dspark.experts_per_token
        return self.n_routed_experts, self.num_experts_per_tok

    @property
    def draft_layers(self) -> int:
        """Number of layers after the backbone: MTP layers, or the stages of a DSpark drafter."""
        return self.num_nextn_predict_layers if self.dspark is None else self.dspark.stages

    @property
    def default_draft_tokens(self) -> int:
        """Default number of tokens to guess ahead: a whole block, or one for each MTP layer."""
        return self.num_nextn_predict_layers if self.dspark is None else self.dspark.block_size

    def without_drafts(self) -> ModelConfig:
        """Return the configuration without its draft layers."""
        return dataclasses.replace(
            self, num_nextn_predict_layers=0, compress_ratios=self.backbone_ratios, dspark=None
        )

    def with_dspark(self, dspark: DSparkConfig) -> ModelConfig:
        """Return the configuration with this drafter."""
        ratios = self.backbone_ratios + (0,) * dspark.stages
        return dataclasses.replace(
            self, num_nextn_predict_layers=0, compress_ratios=ratios, dspark=dspark
        )

    @classmethod
    def from_dir(cls, directory: str | Path, *, drafts: bool = True) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory.

        Args:
            directory: directory that holds the file.
            drafts: True to read draft layers, see ``from_dict``.

        Raises:
            ConfigError: the directory or file does not exist, holds no JSON object, or
                ``from_dict`` refuses it.
        """
        path = Path(directory) / "config.json"
        if not Path(directory).is_dir():
            raise ConfigError(f"{directory}: no such directory{why_no_checkpoint(Path(directory))}")
        try:
            values = read_object(path, _MOST_BYTES)
            return cls.from_dict(_with_manifest(Path(directory), values), drafts=drafts)
        except FileNotFoundError:
            why = why_no_checkpoint(Path(directory))
            raise ConfigError(
                f"{directory}: not a checkpoint, it has no config.json{why}"
            ) from None
        except (OSError, Refused) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, drafts: bool = True) -> ModelConfig:
        """Read a configuration in either spelling.

        No field that changes the mathematics has a guessed default: such a field is required.

        Args:
            values: fields of the file.
            drafts: True to read the fields of draft layers, too. False ignores them, and the model
                has no draft layer.

        Raises:
            ConfigError: a field is missing, of the wrong type, contradicts another, or has an
                unsupported value; the message names it.
        """
        flat = flat_fields(values)
        family = _family(flat)
        fields = Fields(flat if drafts else _of_backbone(flat))
        _require_family(fields)
        layers = fields.integer("num_hidden_layers", minimum=1, maximum=MOST_LAYERS)
        dspark = dspark_config(fields, layers, family)
        mtp = fields.integer("num_nextn_predict_layers", 0, maximum=MOST_DRAFT_LAYERS)
        if dspark is not None or not family.has_mtp:
            mtp = 0
        head_dim = fields.integer("head_dim", minimum=1)
        rope_dim = _rope_dim(fields, head_dim)
        ratios = layer_ratios(
            fields,
            layers,
            mtp if dspark is None else dspark.stages,
            keeps_one=family.keeps_one,
        )
        topk = fields.integer("index_topk", minimum=1)
        vocab = fields.integer("vocab_size", minimum=1)
        backbone = ratios[:layers]
        if family.names_sources:
            sources = listed_sources(fields, backbone, topk)
        else:
            sources = own_sources(fields, backbone, SELECTED_RATIO)
        tables = rope_tables(fields, rope_dim / head_dim, compresses=any(ratios))
        config = cls(
            vocab_size=vocab,
            hidden_size=fields.integer("hidden_size", minimum=1),
            num_hidden_layers=layers,
            num_nextn_predict_layers=mtp,
            num_attention_heads=fields.integer("num_attention_heads", minimum=1),
            head_dim=head_dim,
            qk_rope_head_dim=rope_dim,
            q_lora_rank=fields.integer("q_lora_rank", minimum=1),
            o_groups=fields.integer("o_groups", minimum=1),
            o_lora_rank=fields.integer("o_lora_rank", minimum=1),
            sliding_window=fields.integer("sliding_window", minimum=1),
            compress_ratios=ratios,
            index_n_heads=fields.integer("index_n_heads", minimum=1),
            index_head_dim=fields.integer("index_head_dim", minimum=1),
            index_topk=topk,
            rope_theta=tables.theta,
            compress_rope_theta=tables.compress_theta,
            yarn=tables.yarn,
            max_position_embeddings=fields.integer("max_position_embeddings", minimum=1),
            hc_mult=fields.integer("hc_mult", minimum=1, maximum=_MOST_STREAMS),
            hc_sinkhorn_iters=fields.integer(
                "hc_sinkhorn_iters", minimum=1, maximum=_MOST_ITERATIONS
            ),
            hc_eps=fields.number("hc_eps"),
            n_routed_experts=fields.integer("n_routed_experts", minimum=1, maximum=MOST_EXPERTS),
            n_shared_experts=fields.integer("n_shared_experts", minimum=1),
            num_experts_per_tok=fields.integer("num_experts_per_tok", minimum=1),
            moe_intermediate_size=fields.integer("moe_intermediate_size", minimum=1),
            num_hash_layers=_hash_layers(fields, layers, family),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            swiglu_limit=_swiglu_limit(fields),
            rms_norm_eps=fields.number("rms_norm_eps"),
            bos_token_id=fields.integer("bos_token_id") if fields.has("bos_token_id") else None,
            eos_token_ids=_eos(fields),
            image_token_ids=_image_tokens(fields, family, vocab),
            tie_word_embeddings=bool(flat.get("tie_word_embeddings")),
            quantization=_quantization(fields, family.weight_block),
            expert_dtype=_expert_dtype(fields),
            dspark=dspark,
            family=family,
            sources=sources,
            engram=engram_config(fields, layers, vocab),
        )
        _require_consistent(config)
        return config


def _with_manifest(directory: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add the quantisation that NVIDIA's Model Optimizer describes in a file of its own.

    Raises:
        ConfigError: if the file holds no JSON object that describes a quantisation.
    """
    path = directory / _MANIFEST
    if values.get("quantization_config") is not None or not path.is_file():
        return values
    try:
        said = read_object(path, _MOST_BYTES)["quantization"]
        return values | {"quantization_config": {"quant_method": "modelopt", **said}}
    except (OSError, Refused) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: has no object named quantization") from None


def _family(values: Mapping[str, Any]) -> Family:
    name = values.get("model_type")
    family = family_of(name) if isinstance(name, str) else None
    if family is None:
        raise unsupported("model_type", name, " or ".join(map(repr, FAMILIES)))
    return family


def _hash_layers(fields: Fields, layers: int, family: Family) -> int:
    """Read the number of layers that route by token id, optional for a family without them."""
    if not family.has_hash_layers:
        fields.only("num_hash_layers", 0)
        if fields.has("mlp_layer_types") and hash_layers(fields, layers):
            raise unsupported("mlp_layer_types", fields.values["mlp_layer_types"], "'moe' alone")
        return 0
    return hash_layers(fields, layers)


def _of_backbone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those that describe draft layers."""
    kept = {name: value for name, value in values.items() if not name.startswith("dspark_")}
    kept.pop("num_nextn_predict_layers", None)
    ratios, layers = kept.get("compress_ratios"), kept.get("num_hidden_layers")
    if isinstance(ratios, list | tuple) and isinstance(layers, int):
        kept["compress_ratios"] = ratios[:layers]
    return kept


def _require_family(fields: Fields) -> None:
    """Check every field of which this code supports a single value."""
    main, index = get_layout(MAIN_FP8), get_layout(INDEX_FP8)
    fields.only("head_dim", main.channels)
    fields.only("index_head_dim", index.channels)
    fields.only("num_key_value_heads", 1)
    fields.only("n_shared_experts", 1)
    fields.only("hidden_act", "silu")
    fields.only("scoring_func", "sqrtsoftplus")
    fields.only("topk_method", "noaux_tc")
    fields.only("norm_topk_prob", True)
    fields.only("gate_temp", 1)
    fields.only("n_group", 1)
    fields.only("topk_group", 1)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("tie_word_embeddings", True, False)


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """Read a head's rotated channels, from ``qk_rope_head_dim`` or ``partial_rotary_factor``."""
    if not fields.has("qk_rope_head_dim") and not fields.has("partial_rotary_factor"):
        raise ConfigError("config: qk_rope_head_dim is missing")
    main = get_layout(MAIN_FP8)
    assert isinstance(main, SplitFp8Layout)
    rope_dim = main.channels - main.nope
    fields.only("qk_rope_head_dim", rope_dim)
    fields.only("partial_rotary_factor", rope_dim / head_dim)
    fields.only("qk_nope_head_dim", head_dim - rope_dim)
    fields.only("v_head_dim", head_dim)
    return rope_dim


def _eos(fields: Fields) -> tuple[int, ...]:
    if not fields.has("eos_token_id"):
        return ()
    if isinstance(fields.values["eos_token_id"], list | tuple):
        return fields.integers("eos_token_id")
    return (fields.integer("eos_token_id"),)


def _image_tokens(fields: Fields, family: Family, vocab: int) -> tuple[int, ...]:
    """Read the ids that stand for an image: named by the file, or implied by a vision tower."""
    named = [fields.integer("image_token_id")] if fields.has("image_token_id") else []
    implied = family.image_tokens if fields.integer("vision_n_layers", 0) else ()
    return tuple(sorted({*named, *(token for token in implied if token < vocab)}))


def _swiglu_limit(fields: Fields) -> float:
    zero = fields.values.get("swiglu_limit")
    if isinstance(zero, int | float) and not isinstance(zero, bool) and zero == 0:
        return math.inf
    return fields.number("swiglu_limit")


def _quantization(fields: Fields, block: int) -> Quantization | None:
    if not fields.has("quantization_config"):
        return None
    quantization = fields.section("quantization_config")
    method = quantization.string("quant_method", ("fp8", "modelopt"))
    if method is None:
        raise ConfigError("config: quantization_config.quant_method is missing")
    quantization.only("fmt", "e4m3")
    quantization.only("activation_scheme", "dynamic")
    quantization.only("weight_block_size", [block, block])
    experts = quantization.string("moe_quant_algo", ("NVFP4", "MXFP4", "nvfp4", "mxfp4"))
    experts = None if experts is None else experts.upper()
    if experts == "NVFP4":
        quantization.only("group_size", NVFP4_BLOCK)
    scale_fmt = quantization.string("scale_fmt", ("ue8m0", "fp32", "float32"))
    return Quantization(
        method=method,
        block=(block, block),
        scale_fmt="ue8m0" if scale_fmt == "ue8m0" else "fp32",
        activation_scheme="dynamic",
        experts=experts,
    )


def _expert_dtype(fields: Fields) -> str | None:
    """Read ``expert_dtype``; transformers writes it inside ``quantization_config``."""
    outer = fields.string("expert_dtype", EXPERT_DTYPES)
    inner = fields.section("quantization_config").string("expert_dtype", EXPERT_DTYPES)
    if outer and inner and outer != inner:
        raise ConfigError(
            f"config: expert_dtype is {outer!r}, but quantization_config.expert_dtype is {inner!r}"
        )
    return outer or inner


def _require_consistent(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    if config.sliding_window > config.max_position_embeddings:
        raise unsupported(
            "sliding_window",
            config.sliding_window,
            f"at most max_position_embeddings = {config.max_position_embeddings}",
        )
    if heads % groups:
        raise unsupported("o_groups", groups, f"a divisor of num_attention_heads = {heads}")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise unsupported(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"at most n_routed_experts = {config.n_routed_experts}",
        )
    for name, ids in (
        ("bos_token_id", () if config.bos_token_id is None else (config.bos_token_id,)),
        ("eos_token_id", config.eos_token_ids),
    ):
        for token in ids:
            if token >= config.vocab_size:
                raise unsupported(name, token, f"below vocab_size = {config.vocab_size}")
