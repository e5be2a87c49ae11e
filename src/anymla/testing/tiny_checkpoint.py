"""A small random DeepSeek-V4 or V4.1 in DeepSeek's own layout, for demonstrations and tests.

Head dim, rotary dim, window, indexer and streams have their real sizes; everything else is small.
The same options give the same bytes. ``transformers`` and vLLM read the result as well.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from anymla.formats.files import naming
from anymla.formats.untrusted import Refused, read_object
from anymla.model.checkpoint import INDEX_FILE, SINGLE_FILE
from anymla.model.config import ModelConfig
from anymla.model.schema import (
    LinearShape,
    count_values,
    expected_linears,
    expected_plain,
    expected_tables,
    is_float32,
    least_tensors,
)
from anymla.ops.memory import require_memory
from anymla.runtime.threads import threads
from anymla.testing.tiny_noise import Noise
from anymla.testing.tiny_options import MARK, TinyOptions, tiny_config
from anymla.testing.tiny_storage import (
    Stored,
    store_fp8,
    store_mxfp4,
    store_nvfp4,
    store_plain,
    store_table,
)
from anymla.testing.tiny_tokenizer import write_tokenizer
from anymla.testing.tiny_weights import linear_values, plain_values

# Bytes of Python's own objects: a tensor with its name, and a token with its number.
_TENSOR_BYTES, _TOKEN_BYTES = 1000, 200

_T = TypeVar("_T")

__all__ = ["TinyOptions", "random_tensors", "tiny_config", "write_tiny_checkpoint"]


def write_tiny_checkpoint(
    directory: str | Path, options: TinyOptions | None = None, *, twin: str | Path | None = None
) -> None:
    """Write a checkpoint and, on request, its unquantised twin.

    Args:
        directory: directory to create. An earlier tiny checkpoint in it is replaced.
        options: sizes and kinds; None for the defaults.
        twin: directory of a bfloat16 checkpoint with exactly the dequantised values; None for no
            twin.

    Raises:
        ValueError: no model can have these options, or the directory holds other files.
        NotEnoughMemory: this machine cannot hold the tensors; nothing has been written.
    """
    options = options or TinyOptions()
    config = tiny_config(options)
    targets = [Path(directory)] if twin is None else [Path(directory), Path(twin)]
    if len({target.resolve() for target in targets}) < len(targets):
        raise ValueError(f"{directory}: the twin needs a directory of its own")
    model = ModelConfig.from_dict(config)
    vocab, longest = model.vocab_size, model.max_position_embeddings
    require_memory(f"a checkpoint in {directory}", _least_bytes(options, model))
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(_prepared(target))
        with threads(1):  # thousands of small tensors gain nothing from more
            stored, values = random_tensors(options, model, keep_values=twin is not None)
        _write(targets[0], config, stored, options.shards, vocab, longest)
        if twin is not None:
            plain = {
                k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")
            }
            _write(targets[1], plain, values, options.shards, vocab, longest)


def _least_bytes(options: TinyOptions, config: ModelConfig) -> dict[str, int]:
    """Return a lower bound of the tensors' bytes, before they are written."""
    tables = config.num_hash_layers and 12 * config.vocab_size * config.n_routed_experts
    return {
        # A linear layer in FP4 has half a byte a value, all other tensors more.
        "values": count_values(config) // 2,
        "tensors": _TENSOR_BYTES * least_tensors(config),
        "token tables": tables,
        "vocabulary": _TOKEN_BYTES * options.vocab,
    }


def random_tensors(
    options: TinyOptions, config: ModelConfig, *, keep_values: bool = False, prefix: str = ""
) -> tuple[Stored, dict[str, Tensor]]:
    """Draw a checkpoint's tensors as stored and, for a twin, with linear layers dequantised.

    Args:
        options: kinds of weights, and the seed; sizes are the configuration's.
        config: configuration with names and sizes.
        keep_values: True to return the twin's tensors as well.
        prefix: restriction to tensors whose names begin with it.
    """
    noise = Noise(options.seed)
    stored: Stored = {}
    values: dict[str, Tensor] = {}
    for name, expected in _beginning(expected_plain(config), prefix):
        if name.endswith(".tid2eid"):
            rows, count = expected.shape
            tensor = noise.distinct(name, rows, count, config.n_routed_experts)
        else:
            tensor = plain_values(noise, name, expected.shape)
            tensor = tensor if is_float32(name) else tensor.bfloat16()
        stored[name] = values[name] = tensor
    for name, shape in _beginning(expected_linears(config), prefix):
        weight = linear_values(noise, name, shape.rows, shape.columns)
        tensors, value = _store(options, name, shape, weight)
        stored |= tensors
        if keep_values:
            values[f"{name}.weight"] = value
    for name, size in _beginning(expected_tables(config), prefix):
        table = noise.normal(name, *size)
        quantised = options.weights != "bf16"
        tensors, value = store_table(name, table) if quantised else store_plain(name, table)
        stored |= tensors
        values[f"{name}.weight"] = value
    return stored, values


def _beginning(named: Mapping[str, _T], prefix: str) -> list[tuple[str, _T]]:
    return [(name, value) for name, value in named.items() if name.startswith(prefix)]


def _store(
    options: TinyOptions, prefix: str, shape: LinearShape, weight: Tensor
) -> tuple[Stored, Tensor]:
    """Store one linear layer in the kind that the options give."""
    expert = ".ffn.experts." in prefix
    if options.nvfp4_attention and ".attn." in prefix and "nvfp4" in shape.kinds:
        return store_nvfp4(prefix, weight)
    if options.weights == "bf16" or "fp8" not in shape.kinds:
        return store_plain(prefix, weight)
    if options.weights == "nvfp4" and expert and prefix.startswith("layers."):
        return store_nvfp4(prefix, weight, static_input=True)
    if options.weights in ("fp4", "nvfp4") and expert:
        return store_mxfp4(prefix, weight)
    return store_fp8(prefix, weight, options.scale_format, options.weight_block)


@contextlib.contextmanager
def _prepared(directory: Path) -> Iterator[None]:
    """Prepare a directory for writing, and leave nothing in it if that fails."""
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        _prepare(directory)
        try:
            yield
        except BaseException:
            _clear(directory)
            raise
    except BaseException:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


def _prepare(directory: Path) -> None:
    """Create the directory, or empty it of an earlier tiny checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        return
    try:
        replaceable = MARK in read_object(directory / "config.json")
    except (OSError, Refused):
        replaceable = False
    if not replaceable:
        raise ValueError(f"{directory}: is not empty and holds no tiny checkpoint to replace")
    _clear(directory)


def _clear(directory: Path) -> None:
    """Remove a checkpoint's files, the configuration last: it marks the rest as replaceable."""
    names = (INDEX_FILE, "tokenizer.json", "tokenizer_config.json", "config.json")
    for path in [*directory.glob("*.safetensors"), *(directory / name for name in names)]:
        path.unlink(missing_ok=True)


def _write(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shards: int,
    vocab: int,
    longest: int,
) -> None:
    # The configuration comes first: it marks a half-written directory as replaceable.
    _write_text(directory / "config.json", json.dumps(config, indent=2))
    with naming(directory):
        write_tokenizer(directory, vocab, longest)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        _save(contiguous, directory / SINGLE_FILE)
        return
    names = list(contiguous)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        _save({name: contiguous[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in contiguous.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(directory / INDEX_FILE, json.dumps(index, indent=2))


def _write_text(path: Path, text: str) -> None:
    with naming(path):
        path.write_text(text + "\n", encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    with naming(path):
        save_file(tensors, path, metadata={"format": "pt"})
