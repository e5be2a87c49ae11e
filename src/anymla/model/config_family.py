"""Model families: mathematics implied by a ``model_type``, and its spelling of ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from anymla.model.config_fields import ConfigError, unsupported


@dataclasses.dataclass(frozen=True)
class Family:
    """Mathematics that no field of the file describes.

    Attributes:
        norms_heads: True if query heads are divided by their root mean square.
        position_bias: True if a compressor adds a bias by position within the window to its scores.
        overlap_ratio: ratio whose entries also pool the window before their own; 0 for none.
        latent_keys: True if index keys are projected from the entries, False if pooled on their
            own.
        hadamard: True if MXFP4 index keys and queries are rotated by the Hadamard matrix.
        delayed: True if a hyper-connection collapses the streams with the gates of the site before
            it.
        weight_block: rows and columns of an FP8 weight, and channels of an activation, that share a
            scale.
        keeps_one: True if a ratio of 1 means an entry for every token; False if engines write it
            for 0.
        names_sources: True if the file lists the layers that compress and those that select.
        has_hash_layers: True if the first layers route by token id, as many as the file says.
        has_mtp: True if ``num_nextn_predict_layers`` counts MTP layers, False if a drafter's
            stages.
        taps_at_entry: True if a drafter's context is computed from the inputs of its target layers,
            False if from their outputs.
        markov_tables: names of the tables of a drafter's Markov head.
        image_tokens: ids that stand for an image in a prompt of a model with ``vision_n_layers``.
        encoding: name of the dialogue format used without a chat template.
    """

    norms_heads: bool = True
    position_bias: bool = True
    overlap_ratio: int = 4
    latent_keys: bool = False
    hadamard: bool = True
    delayed: bool = False
    weight_block: int = 128
    keeps_one: bool = False
    names_sources: bool = False
    has_hash_layers: bool = True
    has_mtp: bool = True
    taps_at_entry: bool = False
    markov_tables: tuple[str, str] = ("markov_w1", "markov_w2")
    image_tokens: tuple[int, ...] = ()
    encoding: str = "deepseek_v4"


FAMILIES = {
    # The placeholder of an image, and the ids that vLLM replaces it by: start, padding, pieces,
    # ends.
    "deepseek_v4": Family(image_tokens=(129264, *range(129257, 129262))),
    "deepseek_v41": Family(
        norms_heads=False,
        position_bias=False,
        overlap_ratio=0,
        latent_keys=True,
        hadamard=False,
        delayed=True,
        weight_block=32,
        keeps_one=True,
        names_sources=True,
        has_hash_layers=False,
        has_mtp=False,
        taps_at_entry=True,
        markov_tables=("embed", "head"),
        encoding="deepseek_v41",
    ),
}

# Names in DeepSeek's inference code that differ, and names that transformers gives to another
# field.
_OTHER_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "rope_head_dim": "qk_rope_head_dim",
    "n_activated_experts": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "moe_inter_dim": "moe_intermediate_size",
    "intermediate_size": "moe_intermediate_size",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
}
# A text model within a larger one has its model_type in this section.
_TEXT = "text_config"
_TEXT_SUFFIX = "_text"


def family_of(model_type: str) -> Family | None:
    """Return the family of a model type, also with the text model's suffix, or None."""
    return FAMILIES.get(model_type.removesuffix(_TEXT_SUFFIX))


def flat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model under their usual names, in one object.

    ``text_config`` is taken out of the object that contains it, whose other fields stay, and the
    names of DeepSeek's inference code and of transformers are replaced. A field that occurs in both
    places, or under both names, must have one value.

    Raises:
        ConfigError: ``text_config`` is no object, or a field has two values.
    """
    flat = {name: value for name, value in values.items() if name != _TEXT}
    nested = values.get(_TEXT)
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise unsupported(_TEXT, nested, "an object")
        for name, value in nested.items():
            _place(flat, name, f"{_TEXT}.{name}", value)
    for theirs, ours in _OTHER_NAMES.items():
        if theirs in flat:
            _place(flat, ours, theirs, flat.pop(theirs))
    return flat


def _place(flat: dict[str, Any], name: str, written: str, value: Any) -> None:
    known = flat.get(name)
    if name == "model_type" and value == f"{known}{_TEXT_SUFFIX}":
        return
    if known is not None and value is not None and known != value:
        raise ConfigError(f"config: {name} is {known!r}, but {written} is {value!r}")
    if value is not None:
        flat[name] = value
