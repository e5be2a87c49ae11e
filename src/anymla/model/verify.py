"""Comparison of a checkpoint with the needs of its configuration, before anything is built."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import torch
from torch import Tensor

from anymla.layers.linear import WeightKind
from anymla.model.checkpoint import Checkpoint, CheckpointError, enumerate_some
from anymla.model.config import ModelConfig
from anymla.model.schema import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    LinearShape,
    expected_linears,
    expected_plain,
    expected_tensors,
    least_tensors,
    quantised_tables,
    weight_kind,
)

# Largest number of values of a tensor that is checked for NaN before the model is built.
_SMALL = 1 << 20

# Meanings of ``expert_dtype``; NVIDIA's releases keep the "fp4" of their originals.
EXPERT_KINDS: dict[str, tuple[WeightKind, ...]] = {
    "fp4": ("mxfp4", "nvfp4"),
    "fp8": ("fp8",),
    "bf16": ("plain",),
}


EXPERT_ALGORITHMS: dict[str, WeightKind] = {"NVFP4": "nvfp4", "MXFP4": "mxfp4"}


@dataclasses.dataclass(frozen=True)
class Report:
    """Differences between a checkpoint and the needs of its configuration.

    Attributes:
        missing: names of tensors that must be present.
        unexpected: names of tensors that nothing reads.
        wrong: one sentence for each tensor of another shape, dtype, kind or value.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the checkpoint can be loaded."""
        return not (self.missing or self.unexpected or self.wrong)

    def summary(self) -> str:
        """Describe the report in one line that names the first tensors of each sort."""
        parts = [f"missing {enumerate_some(self.missing)}"] if self.missing else []
        if self.unexpected:
            parts.append(f"unexpected {enumerate_some(self.unexpected)}")
        if self.wrong:
            parts.append(enumerate_some(self.wrong))
        return "; ".join(parts)


def verify(checkpoint: Checkpoint, config: ModelConfig) -> Report:
    """Compare names, shapes, dtypes, kinds of linear layers, and the values of scales and tables.

    Args:
        checkpoint: files of the checkpoint.
        config: configuration in the same directory, see ``drafts.present_config``.

    Raises:
        CheckpointError: the configuration has another size altogether, so that no list is useful.
    """
    found = verify_names(checkpoint, config)
    wrong = [*found.wrong, *_wrong_kinds(checkpoint, config)]
    if not found.missing and not wrong:
        wrong += _wrong_values(checkpoint, config)
    return dataclasses.replace(found, wrong=tuple(wrong))


def verify_names(checkpoint: Checkpoint, config: ModelConfig) -> Report:
    """Run ``verify`` for names, shapes and dtypes alone, without reading values."""
    least = least_tensors(config)
    if least > 10 * len(checkpoint) + 10_000:
        raise CheckpointError(
            f"{checkpoint.directory}: config needs at least {least} tensors, the files have "
            f"{len(checkpoint)}"
        )
    expected = expected_tensors(config, checkpoint)
    missing = [n for n, e in expected.items() if n not in checkpoint and not e.optional]
    unexpected = [name for name in checkpoint if name not in expected]
    wrong = [
        f"{name} is {info.dtype} {list(info.shape)}, must be {expected[name]}"
        for name, info in checkpoint.items()
        if name in expected and not expected[name].fits(info)
    ]
    return Report(tuple(missing), tuple(unexpected), tuple(wrong))


def require_loadable(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise unless ``verify`` finds nothing.

    Raises:
        CheckpointError: tensors are missing, unexpected or wrong; the message names them in one
            line.
    """
    report = verify(checkpoint, config)
    if not report.ok:
        raise CheckpointError(f"{checkpoint.directory}: {report.summary()}")


def _is_finite(name: str, values: Tensor) -> bool:
    """True if no value is NaN or infinite; a sink of -inf is allowed, as one without weight."""
    if not values.is_floating_point():
        return True
    fine = values.isfinite()
    if name.endswith(".attn_sink"):
        fine |= values == -torch.inf
    return bool(fine.all())


def _wrong_kinds(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """List linear layers in a kind that cannot be read there, or that contradicts the config."""
    wrong = []
    expert_kinds: dict[str, set[WeightKind]] = defaultdict(set)
    declared, said = _declared_experts(config)
    for prefix, shape in _linears(checkpoint, config).items():
        if f"{prefix}.weight" not in checkpoint:
            continue
        kind = weight_kind(checkpoint, prefix)
        layer, is_expert, _ = prefix.partition(".ffn.experts.")
        if kind not in shape.kinds:
            wrong.append(f"{prefix} is stored as {kind}, can read {' or '.join(shape.kinds)}")
        elif kind != "plain" and config.quantization is None:
            wrong.append(f"{prefix} is stored as {kind}, but config has no quantization_config")
        elif is_expert and prefix.startswith("layers.") and declared and kind not in declared:
            # Drafters are converted separately, or not at all.
            wrong.append(f"{prefix} is stored as {kind}, but config says {said}")
        if is_expert:
            expert_kinds[layer].add(kind)
    wrong += [
        f"{layer}.ffn.experts mixes {' and '.join(sorted(kinds))}, must be of one kind"
        for layer, kinds in expert_kinds.items()
        if len(kinds) > 1
    ]
    return wrong


def _linears(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, LinearShape]:
    return expected_linears(config) | quantised_tables(config, checkpoint)


def _declared_experts(config: ModelConfig) -> tuple[tuple[WeightKind, ...], str]:
    """Return the kinds allowed for the backbone's experts, or none, and the field's words.

    In an unquantised checkpoint, ``expert_dtype`` is left over from before the experts were
    decoded.
    """
    if config.quantization is None:
        return (), ""
    if (said := config.quantization.experts) is not None:
        return (EXPERT_ALGORITHMS[said],), f"moe_quant_algo {said}"
    if config.expert_dtype is None:
        return (), ""
    return EXPERT_KINDS[config.expert_dtype], f"expert_dtype {config.expert_dtype}"


def _wrong_values(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """List scales, token tables and small tensors whose values are invalid.

    Large tensors are not read for this; faults in them show in the logits.
    """
    wrong = [
        f"{name} holds NaN or an infinity"
        for name, expected in expected_plain(config).items()
        if name in checkpoint
        and checkpoint[name].dtype in (*FLOAT_DTYPES, *INTEGER_DTYPES)
        and math.prod(expected.shape) <= _SMALL
        and not _is_finite(name, checkpoint.tensor(name))
    ]
    for prefix in _linears(checkpoint, config):
        kind = weight_kind(checkpoint, prefix)
        name = f"{prefix}.weight_scale_2" if kind == "nvfp4" else f"{prefix}.scale"
        if kind == "plain" or checkpoint[name].dtype != "F32":
            continue
        scale = checkpoint.tensor(name)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            wrong.append(f"{name} holds scales that are not positive numbers")
        elif kind == "mxfp4" and not bool((torch.frexp(scale).mantissa == 0.5).all()):
            wrong.append(f"{name} holds scales that are not powers of two, as MXFP4 needs")
    for layer in range(min(config.num_hash_layers, config.num_hidden_layers)):
        name = f"layers.{layer}.ffn.gate.tid2eid"
        table = checkpoint.tensor(name)
        if bool(((table < 0) | (table >= config.n_routed_experts)).any()):
            wrong.append(f"{name} names experts outside 0..{config.n_routed_experts - 1}")
    return wrong
