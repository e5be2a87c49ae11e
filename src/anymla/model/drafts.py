"""The drafter in a checkpoint: MTP layers, a DSpark drafter, or none.

Both use the prefix ``mtp.N.``, and their configurations overlap, so the tensors decide.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterable
from typing import Literal

from anymla.model.checkpoint import Checkpoint, CheckpointError
from anymla.model.config import ModelConfig

DraftKind = Literal["mtp", "dspark"]
Drafts = Literal["auto", "off", "mtp", "dspark"]
DRAFTS: tuple[Drafts, ...] = ("auto", "off", "mtp", "dspark")
DRAFTERS: dict[str | None, str] = {
    "mtp": "MTP layers",
    "dspark": "a DSpark drafter",
    None: "no drafter",
}

_VISION = ("vision.*", "aligner.*", "image_*", "*.ffn.gate.bias_vl")
# Scales of activations and cache rows, for engines with static quantisation.
_STATIC_SCALES = tuple(f"*.{name}_scale" for name in ("input", "output", "q", "k", "v", "kv"))

_PREFIX = "mtp."
# Tensors that one kind of drafter has and the other has not.
_MARKS: dict[DraftKind, re.Pattern[str]] = {
    "mtp": re.compile(r"mtp\.\d+\.(e_proj|h_proj|enorm|hnorm)\."),
    "dspark": re.compile(r"mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\."),
}


def draft_kind(config: ModelConfig) -> DraftKind | None:
    """Return the kind of a model's drafter."""
    if config.dspark is not None:
        return "dspark"
    return "mtp" if config.num_nextn_predict_layers else None


def present_config(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Adapt the configuration to the tensors that are present.

    Without draft layers in the files there are none: transformers keeps
    ``num_nextn_predict_layers`` when it saves a model, but not the layers. A DSpark drafter has as
    many stages as the files have ``mtp.N``, and may have no confidence head.

    Tensors that nothing reads are ignored.

    Raises:
        CheckpointError: the files hold a drafter that the configuration does not describe, or
            another number of stages.
    """
    checkpoint = readable(checkpoint, config)
    names = [name for name in checkpoint if name.startswith(_PREFIX)]
    if not names:
        return config.without_drafts()
    described: DraftKind = "mtp" if config.dspark is None else "dspark"
    for kind, mark in _MARKS.items():
        found = next((name for name in names if mark.match(name)), None)
        if found is not None and kind != described:
            told = "a" if kind == "mtp" else "no"
            raise CheckpointError(
                f"{checkpoint.directory}: {found} belongs to {DRAFTERS[kind]}, but config.json has "
                f"{told} dspark_block_size; it loads without drafts only"
            )
    return config if config.dspark is None else _with_stages(checkpoint, config, names)


def readable(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """Remove the tensors that no part of a text model reads."""
    unread = re.compile(
        "|".join(map(fnmatch.translate, itertools.chain(*_unread(config).values())))
    )
    return checkpoint.kept(lambda name: not unread.match(name))


def unread_lines(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Describe each kind of tensor that is not read in a line with its name patterns."""
    lines = []
    for what, patterns in _unread(config).items():
        counts = {pattern: len(fnmatch.filter(checkpoint, pattern)) for pattern in patterns}
        if total := sum(counts.values()):
            named = ", ".join(pattern for pattern, count in counts.items() if count)
            lines.append(f"{checkpoint.directory}: {total} {what} tensors ({named}) are not read")
    return lines


def _unread(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return name patterns of tensors that no part of a text model reads, by kind."""
    # With a vision tower, layers that route by token id also have the other layers' bias.
    biases = tuple(f"layers.{layer}.ffn.gate.bias" for layer in range(config.num_hash_layers))
    return {"vision": (*_VISION, *biases), "static scale": _STATIC_SCALES}


def choose_drafts(
    checkpoint: Checkpoint, config: ModelConfig, drafts: Drafts
) -> tuple[Checkpoint, ModelConfig]:
    """Return the tensors and the configuration of a model with the chosen drafter.

    Args:
        checkpoint: files of the model.
        config: configuration in the same directory.
        drafts: "auto": with the drafter in the files, if there is one; "off": without, and
            ``mtp.*`` is ignored; "mtp" or "dspark": with this one.

    Raises:
        ValueError: ``drafts`` is another word.
        CheckpointError: see ``present_config``, or the chosen drafter is absent.
    """
    if drafts not in DRAFTS:
        raise ValueError(f"drafts must be {', '.join(DRAFTS)}, got {drafts!r}")
    checkpoint = readable(checkpoint, config)
    if drafts == "off":
        backbone = checkpoint.kept(lambda name: not name.startswith(_PREFIX))
        return backbone, config.without_drafts()
    present = present_config(checkpoint, config)
    kind = draft_kind(present)
    if drafts not in ("auto", kind):
        raise CheckpointError(
            f"{checkpoint.directory}: holds {DRAFTERS[kind]}, asked for: {DRAFTERS[drafts]}"
        )
    return checkpoint, present


def _with_stages(checkpoint: Checkpoint, config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Return the configuration with the stages, and the confidence head, of the tensors."""
    assert config.dspark is not None
    numbers = {name.split(".")[1] for name in names}
    count = len(numbers)
    if numbers != {str(number) for number in range(count)}:
        listed = ", ".join(sorted(f"mtp.{number}" for number in numbers)[:8])
        raise CheckpointError(
            f"{checkpoint.directory}: stages must be mtp.0 to mtp.{count - 1}, the files have "
            f"{listed}"
        )
    if config.dspark.stages not in (0, count):
        raise CheckpointError(
            f"{checkpoint.directory}: the files hold {count} draft stages, compress_ratios in "
            f"config.json has {config.dspark.stages}"
        )
    head = f"mtp.{count - 1}.confidence_head.proj.weight" in checkpoint
    return config.with_dspark(dataclasses.replace(config.dspark, stages=count, confidence=head))
