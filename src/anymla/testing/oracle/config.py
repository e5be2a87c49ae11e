"""The fields of config.json that the mathematics needs, read without anymla's own parser."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's parameters; without mscale, which DeepSeek-V4 does not use."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True)
class DSpark:
    """Numbers of a DSpark drafter; the tensors decide the number of stages.

    Its context is computed from the outputs of the target layers, in V4.1 from the inputs of their
    first sites.
    """

    block_size: int
    noise_token: int
    target_layers: tuple[int, ...]
    experts_per_token: int


@dataclasses.dataclass(frozen=True)
class EngramNumbers:
    """Numbers that determine the rows of n-grams, see ``testing.oracle.engram``."""

    layers: tuple[int, ...]
    max_ngram: int
    buckets: int
    heads: int
    pad_token: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Layers that others share in DeepSeek-V4.1; a layer's source is the last one up to itself.

    Attributes:
        kv: indices of layers that write entries.
        index: indices of layers that select.
        candidates: layer that keeps blocks of entries, number of blocks, and their size; or None.
    """

    kv: tuple[int, ...]
    index: tuple[int, ...]
    candidates: tuple[int, int, int] | None

    @staticmethod
    def source(layers: tuple[int, ...], layer: int) -> int:
        """Return the last of the layers up to this one."""
        return max(one for one in layers if one <= layer)


@dataclasses.dataclass(frozen=True)
class OracleConfig:
    """Numbers that determine the forward pass.

    Attributes:
        ratios: compression ratio per layer, backbone then MTP; 0 for none.
        dspark: numbers of the DSpark drafter, or None.
        weight_block: rows and columns that share a scale in an FP8 weight.
        dynamic_activations: True if quantised layers quantise their inputs, in reduced precision.
        sharing: sharing of a DeepSeek-V4.1, whose heads have no norm and whose sites are delayed.
            None for V4.
        engram: numbers of the memory of n-grams, or None.
    """

    layers: int
    mtp_layers: int
    heads: int
    head_dim: int
    rope_dim: int
    groups: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    sinkhorn_iters: int
    hc_eps: float
    experts_per_token: int
    hash_layers: int
    routed_scaling: float
    swiglu_limit: float
    norm_eps: float
    weight_block: tuple[int, int]
    dynamic_activations: bool
    dspark: DSpark | None = None
    sharing: Sharing | None = None
    engram: EngramNumbers | None = None

    @classmethod
    def from_dir(cls, directory: str | pathlib.Path) -> OracleConfig:
        """Read DIR/config.json, in DeepSeek's or in transformers' spelling."""
        text = (pathlib.Path(directory) / "config.json").read_text(encoding="utf-8")
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> OracleConfig:
        """Read the numbers of a parsed config.json; V4.1's text model is nested in it."""
        raw = raw | raw.get("text_config", {})
        main, compress = _rope_sections(raw)
        layers = raw["num_hidden_layers"]
        head_dim = raw["head_dim"]
        sharing = _sharing(raw)
        mtp_layers = 0 if sharing else raw.get("num_nextn_predict_layers", 0)
        rope_dim = raw.get("qk_rope_head_dim")
        if rope_dim is None:
            rope_dim = round(head_dim * raw.get("partial_rotary_factor", 64 / 512))
        quantization = raw.get("quantization_config") or {}
        return cls(
            layers=layers,
            mtp_layers=mtp_layers,
            heads=raw["num_attention_heads"],
            head_dim=head_dim,
            rope_dim=rope_dim,
            groups=raw["o_groups"],
            window=raw["sliding_window"],
            ratios=tuple(raw["compress_ratios"]) if sharing else _ratios(raw, layers, mtp_layers),
            index_heads=raw["index_n_heads"],
            index_dim=raw["index_head_dim"],
            index_topk=raw["index_topk"],
            rope_theta=float(main.get("rope_theta", raw.get("rope_theta", 10000))),
            compress_rope_theta=float(
                compress.get("rope_theta", raw.get("compress_rope_theta", 160000))
            ),
            yarn=_yarn(compress),
            sinkhorn_iters=raw["hc_sinkhorn_iters"],
            hc_eps=raw["hc_eps"],
            experts_per_token=raw["num_experts_per_tok"],
            hash_layers=0 if sharing else _hash_layers(raw),
            routed_scaling=raw["routed_scaling_factor"],
            swiglu_limit=raw["swiglu_limit"] or math.inf,
            norm_eps=raw["rms_norm_eps"],
            weight_block=tuple(quantization.get("weight_block_size") or (128, 128)),
            dynamic_activations=quantization.get("activation_scheme") == "dynamic",
            dspark=_dspark(raw),
            sharing=sharing,
            engram=_engram(raw),
        )


_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def _ratios(raw: dict[str, Any], layers: int, mtp_layers: int) -> tuple[int, ...]:
    ratios = raw.get("compress_ratios")
    if ratios is None:
        rates = raw.get("compress_rates") or {}
        ratios = [rates.get(kind, _LAYER_TYPES[kind]) for kind in raw["layer_types"]]
    # Ratio 1 means "uncompressed" as well; layers after the backbone see the window only.
    backbone = [ratio if ratio > 1 else 0 for ratio in ratios[:layers]]
    return tuple(backbone + [0] * mtp_layers)


def _sharing(raw: dict[str, Any]) -> Sharing | None:
    if "kv_source_layer_ids" not in raw:
        return None
    source = raw.get("candidate_source_layer_id", -1)
    candidates = (source, raw["candidate_topk_blocks"], raw["candidate_block_size"])
    return Sharing(
        tuple(raw["kv_source_layer_ids"]),
        tuple(raw["index_source_layer_ids"]),
        None if source < 0 else candidates,
    )


def _engram(raw: dict[str, Any]) -> EngramNumbers | None:
    if not raw.get("engram_layer_ids"):
        return None
    return EngramNumbers(
        layers=tuple(raw["engram_layer_ids"]),
        max_ngram=raw["engram_max_ngram_size"],
        buckets=raw["engram_vocab_size"],
        heads=raw["engram_n_heads"],
        pad_token=raw["engram_pad_token_id"],
        tokens=raw["engram_compressed_vocab_size"],
    )


def _dspark(raw: dict[str, Any]) -> DSpark | None:
    if raw.get("dspark_block_size") is None:
        return None
    return DSpark(
        block_size=raw["dspark_block_size"],
        noise_token=raw["dspark_noise_token_id"],
        target_layers=tuple(raw["dspark_target_layer_ids"]),
        experts_per_token=raw.get("dspark_num_experts_per_tok", raw["num_experts_per_tok"]),
    )


def _hash_layers(raw: dict[str, Any]) -> int:
    if "num_hash_layers" in raw:
        return int(raw["num_hash_layers"])
    return sum(kind == "hash_moe" for kind in raw["mlp_layer_types"])


def _rope_sections(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters of uncompressed and of compressed layers.

    A flat section holds the YaRN numbers of the compressed layers; a base in it is ignored.
    """
    section = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if "main" in section:
        return section["main"], section["compress"]
    return {}, {key: value for key, value in section.items() if key != "rope_theta"}


def _yarn(section: dict[str, Any]) -> Yarn | None:
    if section.get("rope_type", section.get("type")) != "yarn":
        return None
    return Yarn(
        factor=float(section["factor"]),
        original=int(section["original_max_position_embeddings"]),
        beta_fast=float(section.get("beta_fast", 32)),
        beta_slow=float(section.get("beta_slow", 1)),
    )
