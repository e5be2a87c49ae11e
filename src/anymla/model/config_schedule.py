"""The parts of a configuration that two spellings write differently: layers and rotary tables."""

from __future__ import annotations

import dataclasses

from anymla.model.config_fields import ConfigError, Fields, unsupported
from anymla.ops.norm_rope.rope_tables import YarnScaling

# transformers' names of the attention kinds, with the ratio each must have; None is free.
WINDOW_ONLY = "sliding_attention"
SELECTED = "compressed_sparse_attention"
DENSE = "heavily_compressed_attention"
SELECTED_RATIO = 4


@dataclasses.dataclass(frozen=True)
class RopeTables:
    """Bases of the two rotary tables, and the scaling of the second.

    Attributes:
        theta: base for layers without compression.
        compress_theta: base for layers that compress.
        yarn: scaling of the latter table, or None.
    """

    theta: float
    compress_theta: float
    yarn: YarnScaling | None


def layer_ratios(
    fields: Fields, layers: int, drafts: int, *, keeps_one: bool = False
) -> tuple[int, ...]:
    """Compress ratios of the backbone layers, then of the draft layers; 0 means window only.

    ``layer_types`` describes the backbone; if both spellings are present they must agree.

    Args:
        fields: the configuration.
        layers: of the backbone.
        drafts: layers behind it.
        keeps_one: a ratio of 1 is one, and not what engines write for 0.

    Raises:
        ConfigError: neither spelling is present, a list has the wrong length, they disagree, or a
            draft layer compresses.
    """
    named = _ratios_of_types(fields, layers) if fields.has("layer_types") else None
    if not fields.has("compress_ratios"):
        if named is None:
            raise ConfigError("config: compress_ratios is missing")
        return named + (0,) * drafts
    # Engines write 1 where DeepSeek-V4 has 0.
    none = (0,) if keeps_one else (0, 1)
    listed = tuple(0 if r in none else r for r in fields.integers("compress_ratios"))
    backbone, rest = listed[:layers], listed[layers:]
    if len(backbone) < layers or (len(rest) > drafts and any(rest[drafts:])):
        raise unsupported(
            "compress_ratios",
            list(fields.values["compress_ratios"]),
            f"one entry for each of {layers} layers and {drafts} draft layers",
        )
    if any(rest):
        raise unsupported(
            "compress_ratios", list(fields.values["compress_ratios"]), "0 for draft layers"
        )
    if named is not None and named != backbone:
        raise ConfigError(
            f"config: compress_ratios is {list(backbone)}, but layer_types means {list(named)}"
        )
    return backbone + (0,) * drafts


def hash_layers(fields: Fields, layers: int) -> int:
    """Number of leading layers whose experts are looked up by token id.

    Raises:
        ConfigError: missing, of the wrong length, or hash layers that are not the leading ones.
    """
    if not fields.has("mlp_layer_types"):
        return min(fields.integer("num_hash_layers"), layers)
    types = fields.values["mlp_layer_types"]
    if not isinstance(types, list | tuple):
        raise unsupported("mlp_layer_types", types, "a list")
    count = sum(one == "hash_moe" for one in types)
    if list(types) != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise unsupported(
            "mlp_layer_types", types, f"{layers} entries, 'hash_moe' first and 'moe' after"
        )
    return count


def rope_tables(fields: Fields, rotary_factor: float, *, compresses: bool) -> RopeTables:
    """Rotary bases and YaRN scaling.

    Nested ``rope_parameters`` ({main, compress}) are complete in themselves. Otherwise the scaling
    is in flat ``rope_parameters`` or ``rope_scaling`` and belongs to the layers that compress.

    Args:
        fields: the configuration.
        rotary_factor: rotated part of a head, to compare.
        compresses: whether any layer has a compressed cache; else that table is not needed.

    Raises:
        ConfigError: a base is missing, a table scaled in a way that is not supported.
    """
    parameters = fields.section("rope_parameters")
    if parameters.has("main") and parameters.has("compress"):
        main, compress = parameters.section("main"), parameters.section("compress")
        main.only("rope_type", "default")
        for table in (main, compress):
            table.only("partial_rotary_factor", rotary_factor)
        return RopeTables(main.number("rope_theta"), compress.number("rope_theta"), _yarn(compress))
    flat = parameters if parameters.values else fields.section("rope_scaling")
    flat.only("partial_rotary_factor", rotary_factor)
    theta = fields if fields.has("rope_theta") or not flat.has("rope_theta") else flat
    unused = None if compresses else theta.number("rope_theta")
    return RopeTables(
        theta.number("rope_theta"), fields.number("compress_rope_theta", unused), _yarn(flat)
    )


def _ratios_of_types(fields: Fields, layers: int) -> tuple[int, ...]:
    types = fields.values["layer_types"]
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise unsupported("layer_types", types, f"a list of {layers} entries")
    rates = fields.section("compress_rates")
    ratios = {WINDOW_ONLY: 0}
    if SELECTED in types:
        # The overlapping pooling and the indexer belong to this ratio, not to the name.
        rates.only(SELECTED, SELECTED_RATIO)
        ratios[SELECTED] = rates.integer(SELECTED)
    if DENSE in types:
        ratios[DENSE] = rates.integer(DENSE, minimum=2)
        if ratios[DENSE] == SELECTED_RATIO:
            raise unsupported(rates.name(DENSE), SELECTED_RATIO, "another ratio than 4")
    unknown = [one for one in types if one not in ratios]
    if unknown:
        raise unsupported("layer_types", unknown[0], f"{WINDOW_ONLY}, {SELECTED} or {DENSE}")
    return tuple(ratios[one] for one in types)


def _yarn(table: Fields) -> YarnScaling | None:
    kind_field = "rope_type" if table.has("rope_type") else "type"
    if table.string(kind_field, ("default", "yarn")) != "yarn":
        return None
    # DeepSeek-V4 applies no magnitude correction, and rounds the ramp's ends to whole pairs.
    table.only("attention_factor", 1)
    table.only("truncate", True)
    return YarnScaling(
        factor=table.number("factor"),
        original_max_position_embeddings=table.integer(
            "original_max_position_embeddings", minimum=1
        ),
        beta_fast=table.number("beta_fast", 32),
        beta_slow=table.number("beta_slow", 1),
    )
