"""Loading of a checkpoint directory into a model that can run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from anymla.formats.untrusted import Refused, read_object
from anymla.layers.ranks import ALONE, Ranks
from anymla.model.build import Builder, Ngrams
from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.drafts import Drafts, choose_drafts, unread_lines
from anymla.model.loading import load_weights
from anymla.model.rank_sizes import rank_bytes
from anymla.model.schema import FLOAT_DTYPES
from anymla.model.token_map import token_map
from anymla.model.transformer import Transformer
from anymla.ops.memory import require_memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SPELLINGS = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "f32": "fp32"}


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the short name of an activation dtype: "bf16", "fp32", or "auto".

    Args:
        dtype: one of these, "bfloat16", "float32", torch's dtypes or their names.

    Raises:
        ValueError: the dtype is another one.
    """
    said = str(dtype).removeprefix("torch.")
    name = _SPELLINGS.get(said, said)
    if name not in (*DTYPES, "auto"):
        raise ValueError(f"dtype must be bf16 (bfloat16), fp32 (float32) or auto, got {said!r}")
    return name


def activation_dtype(dtype: str | torch.dtype, directory: str | Path) -> torch.dtype:
    """Return the dtype of a checkpoint's activations.

    Args:
        dtype: a name as for ``dtype_name``; "auto" is float32 if ``config.json`` says float32, else
            bfloat16.
        directory: directory of the checkpoint.

    Raises:
        ValueError: the dtype is another one, or, with "auto", ``config.json`` cannot be read.
    """
    name = dtype_name(dtype)
    if name == "auto":
        path = Path(directory) / "config.json"
        try:
            fields = read_object(path)
        except (OSError, Refused) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        stored = fields.get("dtype", fields.get("torch_dtype"))
        name = "fp32" if stored == "float32" else "bf16"
    return DTYPES[name]


def load_model(
    directory: str | Path,
    *,
    dtype: str | torch.dtype = "bf16",
    device: torch.device | str = "cpu",
    backend: str | None = None,
    ranks: Ranks = ALONE,
    drafts: Drafts = "auto",
    progress: bool = True,
) -> Transformer:
    """Load a DeepSeek-V4 or V4.1 checkpoint.

    The whole checkpoint is verified before a module is built, so that a model is never half loaded.
    On the CPU, weights that are used as stored stay views of the mapped files. A line on stderr
    names tensors that are no part of the text model.

    Args:
        directory: directory with ``config.json`` and safetensors in DeepSeek's layout.
        dtype: dtype of the activations: bfloat16 or float32, as torch's dtype or its name, or
            "auto" (``activation_dtype``). In float32, weights are decoded exactly and activations
            are never quantised; the same holds for ``torch.float64``, which is for comparisons.
        device: device of weights and activations.
        backend: name of the backend of every operation; None for the best.
        ranks: ranks that share the model; each loads its own part.
        drafts: "auto": with the drafter in the files, if there is one; "off": without, and
            ``mtp.*`` and its fields in ``config.json`` are ignored; "mtp" or "dspark": with this
            one.
        progress: True to show a progress bar on stderr.

    Raises:
        ValueError: unsupported dtype, unknown ``drafts``, or a weight that this number of ranks
            cannot share; ``ConfigError`` or ``CheckpointError`` for a faulty directory.
        NotEnoughMemory: the device has too little memory; nothing has been read.
    """
    if dtype != torch.float64:
        dtype = activation_dtype(dtype, directory)
    assert isinstance(dtype, torch.dtype)
    config = ModelConfig.from_dir(directory, drafts=drafts != "off")
    checkpoint = Checkpoint.open(directory)
    if not ranks.rank and sys.stderr is not None:
        for line in unread_lines(checkpoint, config):
            tqdm.write(line, file=sys.stderr)
    checkpoint, config = choose_drafts(checkpoint, config, drafts)
    device = torch.device(device)
    with load_weights(checkpoint, config, device=device, progress=progress) as weights:
        require_memory(
            f"loading {directory}", _least_bytes(checkpoint, config, dtype, device, ranks), device
        )
        builder = Builder(
            config,
            weights.tensor,
            weights.linear,
            dtype=dtype,
            device=device,
            backend=backend,
            ranks=ranks,
            ngrams=(
                None
                if config.engram is None
                else Ngrams(token_map(directory, config), weights.table)
            ),
        )
        return builder.transformer()


def _least_bytes(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
) -> dict[str, int]:
    """Return a lower bound of the bytes that the weights take on the device.

    On the CPU only plain weights of another dtype are copied, and the head, which is float32 there.
    Other weights stay in the mapped files, and experts are converted when a token visits them.
    """
    if device.type != "cpu":
        return {"weights": rank_bytes(checkpoint, config, ranks.size)}
    copied = 0
    stored_as = "F32" if dtype == torch.float32 else "BF16"
    for name, info in checkpoint.items():
        if info.dtype not in FLOAT_DTYPES or ".ffn.experts." in name:
            continue
        if name == "head.weight":
            copied += 0 if info.dtype == "F32" else 4 * math.prod(info.shape)
        elif info.dtype != stored_as:
            copied += dtype.itemsize * math.prod(info.shape)
    return {"weights in another dtype": copied}
