"""From a checkpoint directory to a model that can run."""

from __future__ import annotations

from pathlib import Path

import torch

from anymla.layers.ranks import ALONE, Ranks
from anymla.model.build import Builder
from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.loading import load_weights
from anymla.model.transformer import Transformer
from anymla.model.verify import present_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    ranks: Ranks = ALONE,
    progress: bool = True,
) -> Transformer:
    """Load a DeepSeek-V4 checkpoint.

    Everything is verified before anything is built, so that a model is never half loaded. On the
    CPU, weights that are used as stored stay views of the mapped files.

    Args:
        directory: with ``config.json`` and safetensors in DeepSeek's layout.
        dtype: of the activations, bfloat16 or float32. In float32, weights are decoded exactly and
            activations are never quantised.
        device: where weights and activations live.
        backend: backend asked of every operation; None for the best.
        ranks: the processes that share the model; each loads its own part.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: unsupported dtype, or a weight that cannot be shared by so many ranks;
            ``ConfigError`` or ``CheckpointError`` for what the directory lacks.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"load_model: dtype must be bfloat16 or float32, got {dtype}")
    config = ModelConfig.from_dir(directory)
    checkpoint = Checkpoint.open(directory)
    config = present_config(checkpoint, config)
    device = torch.device(device)
    with load_weights(checkpoint, config, device=device, progress=progress) as weights:
        builder = Builder(
            config,
            weights.tensor,
            weights.linear,
            dtype=dtype,
            device=device,
            backend=backend,
            ranks=ranks,
        )
        return builder.transformer()
