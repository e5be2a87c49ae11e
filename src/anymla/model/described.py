"""Tensors of a checkpoint without its weights, described by configuration and index."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from anymla.formats.untrusted import Refused, read_object
from anymla.layers.linear import WeightKind
from anymla.model.checkpoint import (
    INDEX_FILE,
    ITEM_BYTES,
    SINGLE_FILE,
    Checkpoint,
    CheckpointError,
    TensorInfo,
    deepseek_name,
)
from anymla.model.config import ModelConfig
from anymla.model.schema import (
    FLOAT_DTYPES,
    Expected,
    LinearShape,
    expected_linears,
    expected_plain,
    expected_tables,
    is_float32,
    linear_tensors,
    table_tensors,
)
from anymla.model.verify import EXPERT_KINDS


def lacks_weights(directory: str | Path) -> bool:
    """True if an index names files of weights, and none of them exists."""
    directory = Path(directory)
    if (directory / SINGLE_FILE).is_file() or not (directory / INDEX_FILE).is_file():
        return False
    return not any((directory / file).is_file() for file in set(_placed(directory).values()))


def described_checkpoint(directory: str | Path, config: ModelConfig) -> Checkpoint:
    """Describe the tensors that an index names, with shapes and dtypes from the configuration.

    A linear layer is quantised if the index has its scales; the configuration decides between FP8
    and MXFP4. A tensor that the configuration does not know has no size.

    Args:
        directory: directory with ``model.safetensors.index.json``.
        config: configuration in the directory's ``config.json``.

    Raises:
        CheckpointError: the index cannot be read.
    """
    directory = Path(directory)
    placed = {deepseek_name(name): file for name, file in _placed(directory).items()}
    expected = _expected(config, placed)
    files = {file: directory / file for file in set(placed.values())}
    tensors = {}
    for name, file in placed.items():
        shape, dtype = expected.get(name, ((0,), "U8"))
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        tensors[name] = TensorInfo(shape, dtype, files[file], nbytes, name)
    return Checkpoint(directory, tensors)


def _placed(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    try:
        weight_map = read_object(path)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, Refused) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: has no weight_map from tensor names to files") from None


def _expected(
    config: ModelConfig, names: Collection[str]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of all tensors that may be present."""
    found: dict[str, Expected] = expected_plain(config)
    vocabulary = LinearShape(config.vocab_size, config.hidden_size, ("plain", "fp8"))
    linears = expected_linears(config) | {"embed": vocabulary, "head": vocabulary}
    for prefix, shape in linears.items():
        kind = _kind(config, names, prefix)
        found |= linear_tensors(prefix, shape, kind, config.family.weight_block)
    for prefix, size in expected_tables(config).items():
        coded: Mapping[str, TensorInfo] = {}
        if f"{prefix}.scale" in names:
            coded = {f"{prefix}.weight": TensorInfo(size, "F8_E4M3", Path(), 0, "")}
        found |= table_tensors(prefix, size, coded)
    return {name: (each.shape, _dtype(name, each)) for name, each in found.items()}


def _kind(config: ModelConfig, names: Collection[str], prefix: str) -> WeightKind:
    if f"{prefix}.weight_scale" in names:
        return "nvfp4"
    if f"{prefix}.scale" not in names:
        return "plain"
    packed = ".ffn.experts." in prefix and "mxfp4" in EXPERT_KINDS.get(
        config.expert_dtype or "", ()
    )
    return "mxfp4" if packed else "fp8"


def _dtype(name: str, expected: Expected) -> str:
    """Return DeepSeek's dtype; of the dtypes that can be read, the first is the usual one."""
    return "F32" if expected.dtypes == FLOAT_DTYPES and is_float32(name) else expected.dtypes[0]
