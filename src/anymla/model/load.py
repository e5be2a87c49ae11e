"""From a checkpoint directory to a model that can run."""

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
    """The short name of a dtype of activations: "bf16", "fp32", or "auto".

    Args:
        dtype: one of these, "bfloat16", "float32", torch's dtypes or their names.

    Raises:
        ValueError: another dtype.
    """
    said = str(dtype).removeprefix("torch.")
    name = _SPELLINGS.get(said, said)
    if name not in (*DTYPES, "auto"):
        raise ValueError(f"dtype must be bf16 (bfloat16), fp32 (float32) or auto, got {said!r}")
    return name


def activation_dtype(dtype: str | torch.dtype, directory: str | Path) -> torch.dtype:
    """The dtype that a checkpoint's activations have.

    Args:
        dtype: as for ``dtype_name``; "auto" is float32 where ``config.json`` says float32, else
            bfloat16.
        directory: the checkpoint's.

    Raises:
        ValueError: another dtype; a ``config.json`` that cannot be read, with "auto".
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

    Everything is verified before anything is built, so that a model is never half loaded. On the
    CPU, weights that are used as stored stay views of the mapped files. Tensors that are no part of
    the text model are named in a line on stderr.

    Args:
        directory: with ``config.json`` and safetensors in DeepSeek's layout.
        dtype: of the activations: bfloat16 or float32, by torch's dtype or its name, or "auto"
            (``activation_dtype``). In float32, weights are decoded exactly and activations are
            never quantised; as in ``torch.float64``, which is for comparisons.
        device: where weights and activations live.
        backend: backend asked of every operation; None for the best.
        ranks: the processes that share the model; each loads its own part.
        drafts: "auto": with the drafter that the files hold, if they hold one; "off": without, and
            neither ``mtp.*`` nor what ``config.json`` says of it is looked at; "mtp" or "dspark":
            with this one.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: unsupported dtype, unknown ``drafts``, or a weight that cannot be shared by so
            many ranks; ``ConfigError`` or ``CheckpointError`` for what the directory lacks.
        NotEnoughMemory: the device has too little for it; nothing has been read.
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
    """What the weights take on the device at the least.

    On the CPU only plain weights of another dtype are copied, and the head, which is float32 there;
    the others stay in the mapped files, and experts are converted when they are visited.
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
