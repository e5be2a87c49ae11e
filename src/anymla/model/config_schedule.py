"""The fields that two spellings of a configuration write differently: layers and rotary tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anymla.model.config_fields import ConfigError, Fields, unsupported
from anymla.ops.norm_rope.rope_tables import YarnScaling

# transformers' names of the attention kinds, each with its required ratio; None for any ratio.
WINDOW_ONLY = "sliding_attention"
SELECTED = "compressed_sparse_attention"
DENSE = "heavily_compressed_attention"
SELECTED_RATIO = 4

ROPE_TYPES = ("default", "yarn")
_DEFAULT_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class RopeTables:
    """Bases of the two rotary tables, and the scaling of the second.

    Attributes:
        theta: base of the table for layers without compression.
        compress_theta: base of the table for layers that compress.
        yarn: scaling of the second table, or None.
    """

    theta: float
    compress_theta: float
    yarn: YarnScaling | None


def layer_ratios(
    fields: Fields, layers: int, drafts: int, *, keeps_one: bool = False
) -> tuple[int, ...]:
    """Read the compress ratios of the backbone layers, then of the draft layers; 0 is window only.

    ``layer_types`` describes the backbone; if both spellings are present they must agree.

    Args:
        fields: fields of the configuration.
        layers: number of backbone layers.
        drafts: number of layers after it.
        keeps_one: True if a ratio of 1 means 1, False if engines write it for 0.

    Raises:
        ConfigError: neither spelling is present, a list has the wrong length, the spellings
            disagree, or a draft layer compresses.
    """
    rates = _compress_rates(fields)
    named = _ratios_of_types(fields, rates, layers) if fields.has("layer_types") else None
    if not fields.has("compress_ratios"):
        if named is None:
            raise ConfigError("config: compress_ratios is missing")
        return named + (0,) * drafts
    # Engines write 1 for DeepSeek-V4's 0.
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
    for ratio in sorted(set(backbone) - {0}):
        rates.only(SELECTED if ratio == SELECTED_RATIO else DENSE, ratio)
    return backbone + (0,) * drafts


def hash_layers(fields: Fields, layers: int) -> int:
    """Read the number of leading layers whose experts are looked up by token id.

    Raises:
        ConfigError: the field is missing or of the wrong length, hash layers are not the leading
            ones, or there are two counts.
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
    if fields.has("num_hash_layers") and min(fields.integer("num_hash_layers"), layers) != count:
        raise ConfigError(
            f"config: num_hash_layers is {fields.values['num_hash_layers']}, but mlp_layer_types "
            f"has {count} 'hash_moe'"
        )
    return count


def rope_tables(fields: Fields, rotary_factor: float, *, compresses: bool) -> RopeTables:
    """Read rotary bases and YaRN scaling, which a file may give in more than one place.

    ``rope_scaling`` replaces ``rope_parameters`` unless it is empty, in either of their two forms.
    The nested form ({main, compress}) is complete in itself. A flat one is the scaling of the
    layers that compress; both bases are separate fields. Files for which transformers would compute
    something else than DeepSeek are refused.

    Args:
        fields: fields of the configuration.
        rotary_factor: rotated fraction of a head, for comparison.
        compresses: True if any layer has a compressed cache; otherwise that table is not needed.

    Raises:
        ConfigError: a base is missing, a table has an unsupported scaling, or two fields contradict
            each other.

    Source: ``DeepseekV4Config`` and ``RotaryEmbeddingConfigMixin`` of transformers 5.
    """
    table = fields.section("rope_scaling")
    if not table.values:
        table = fields.section("rope_parameters")
    nested = [name for name in ("main", "compress") if name in table.values]
    tables = (
        _nested_tables(fields, table, rotary_factor)
        if nested
        else _flat_tables(fields, table, rotary_factor, compresses=compresses)
    )
    _require_inference_names(fields, tables.yarn)
    return tables


def _nested_tables(fields: Fields, table: Fields, rotary_factor: float) -> RopeTables:
    main, compress = table.section("main"), table.section("compress")
    for each in (main, compress):
        if not each.values:
            raise ConfigError(f"config: {each.path} is missing")
        if not fields.has("partial_rotary_factor") and not each.has("partial_rotary_factor"):
            # Without the field, transformers would rotate whole heads.
            raise ConfigError(f"config: {each.name('partial_rotary_factor')} is missing")
        each.only("partial_rotary_factor", rotary_factor)
    _rope_type(main, ROPE_TYPES[:1])
    yarn = _yarn(compress)
    if yarn is not None and not compress.has("attention_factor"):
        # Without the field, transformers would scale cosines and sines by 0.1 ln(factor) + 1.
        raise ConfigError(f"config: {compress.name('attention_factor')} is missing, supported: 1")
    return RopeTables(main.number("rope_theta"), compress.number("rope_theta"), yarn)


def _flat_tables(
    fields: Fields, table: Fields, rotary_factor: float, *, compresses: bool
) -> RopeTables:
    table.only("partial_rotary_factor", rotary_factor)
    if not fields.has("rope_theta") and table.has("rope_theta"):
        # transformers uses this base for layers without compression, whatever the table says.
        table.only("rope_theta", _DEFAULT_THETA)
        theta = _DEFAULT_THETA
    else:
        theta = fields.number("rope_theta")
    compress_theta = fields.number("compress_rope_theta", None if compresses else theta)
    return RopeTables(theta, compress_theta, _yarn(table))


def _require_inference_names(fields: Fields, yarn: YarnScaling | None) -> None:
    """Raise if the fields of DeepSeek's inference code contradict the YaRN scaling."""
    if yarn is None:
        fields.only("original_seq_len", 0)
        if not fields.has("original_seq_len"):
            fields.only("rope_factor", 1)
        return
    fields.only("rope_factor", yarn.factor)
    fields.only("original_seq_len", yarn.original_max_position_embeddings)
    fields.only("original_max_position_embeddings", yarn.original_max_position_embeddings)
    fields.only("beta_fast", yarn.beta_fast)
    fields.only("beta_slow", yarn.beta_slow)


def _compress_rates(fields: Fields) -> Fields:
    """Read ratios by the kind of attention; a kind's separate field must agree."""
    rates = fields.section("compress_rates")
    known = dict(rates.values)
    for name, kind in (("compress_rate_csa", SELECTED), ("compress_rate_hca", DENSE)):
        if fields.has(name):
            if rates.has(kind):
                fields.only(name, rates.values[kind])
            known[kind] = fields.integer(name)
    return Fields(known, rates.path)


def _ratios_of_types(fields: Fields, rates: Fields, layers: int) -> tuple[int, ...]:
    types = fields.values["layer_types"]
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise unsupported("layer_types", types, f"a list of {layers} entries")
    ratios = {WINDOW_ONLY: 0}
    if SELECTED in types:
        # The ratio, not the name, implies the overlapping pooling and the indexer.
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


def _rope_type(table: Fields, allowed: Sequence[str] = ROPE_TYPES) -> str:
    """Read the kind of a table, from ``rope_type`` or its older name ``type``, which must agree."""
    said = [name for name in ("rope_type", "type") if name in table.values]
    for name in said:
        if table.string(name, allowed) is None:
            raise unsupported(table.name(name), None, " or ".join(map(repr, allowed)))
        table.only(name, table.values[said[0]])
    return str(table.values[said[0]]) if said else ROPE_TYPES[0]


def _yarn(table: Fields) -> YarnScaling | None:
    if _rope_type(table) != "yarn":
        return None
    # DeepSeek-V4 applies no magnitude correction, and rounds the ends of the ramp to whole pairs.
    if table.values.get("attention_factor", 1) is None:
        # For null, transformers computes a factor.
        raise unsupported(table.name("attention_factor"), None, "1")
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
