"""Reader of a verified checkpoint: tensors and linear layers by name, with a progress bar."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor
from tqdm import tqdm

from anymla.formats.ue8m0 import encode_ue8m0
from anymla.layers.linear import PackedWeight
from anymla.model.checkpoint import Checkpoint, CheckpointError
from anymla.model.config import ModelConfig
from anymla.model.schema import weight_kind
from anymla.model.verify import require_loadable


class Weights:
    """The tensors of a checkpoint that has been verified as a whole.

    A context manager: the progress bar counts bytes as they are requested, and is closed at the
    end.

    Attributes:
        checkpoint: files of the checkpoint.
        block: rows and columns that share a scale in FP8 weights.
        device: device of the tensors. On the CPU they are views of the mapped files.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, block: int, device: torch.device | str, progress: bool
    ) -> None:
        self.checkpoint = checkpoint
        self.block = block
        self.device = device
        self._bar = tqdm(
            total=checkpoint.nbytes,
            desc="loading",
            unit="B",
            unit_scale=True,
            disable=not progress,
        )

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def tensor(self, name: str) -> Tensor:
        """Read one tensor as stored.

        ``head.weight`` is the embedding in a checkpoint that ties them and has no copy.
        """
        return self._read(name, self.device)

    def table(self, prefix: str) -> tuple[Tensor, Tensor | None]:
        """Read a table as stored, and its scales if any; it stays in the mapped files."""
        weight = self._read(f"{prefix}.weight", "cpu")
        if weight.is_floating_point() and weight.dtype.itemsize > 1:
            return weight, None
        scale = self._read(f"{prefix}.scale", "cpu")
        return weight.view(torch.uint8), scale.view(torch.uint8)

    def _read(self, name: str, device: torch.device | str) -> Tensor:
        name = self._stored(name)
        value = self.checkpoint.tensor(name, device)
        self._bar.update(self.checkpoint[name].nbytes)
        return value

    def _stored(self, name: str) -> str:
        """Return the stored name: a head that is absent is the embedding."""
        tied = name.startswith("head.") and "head.weight" not in self.checkpoint
        return name.replace("head.", "embed.", 1) if tied else name

    def linear(self, prefix: str) -> PackedWeight:
        """Read a linear layer's weight as stored; codes and scale bytes as uint8.

        Scales that are stored in float32 stay float32 for FP8. MXFP4 has no such form: its scales
        become exponent bytes, which is exact because only powers of two pass verification.
        """
        kind = weight_kind(
            self.checkpoint, self._stored(f"{prefix}.weight").removesuffix(".weight")
        )
        weight = self.tensor(f"{prefix}.weight")
        if kind == "plain":
            return PackedWeight(kind, weight)
        if kind == "nvfp4":
            scale = self.tensor(f"{prefix}.weight_scale").view(torch.uint8)
            global_scale = self.tensor(f"{prefix}.weight_scale_2").reshape(1)
            return PackedWeight(kind, weight.view(torch.uint8), scale, global_scale)
        scale = self.tensor(f"{prefix}.scale")
        if scale.dtype != torch.float32:
            scale = scale.view(torch.uint8)
        elif kind == "mxfp4":
            scale = exponent_bytes(scale, f"{prefix}.scale")
        return PackedWeight(kind, weight.view(torch.uint8), scale, block=self.block)


def exponent_bytes(scale: Tensor, name: str) -> Tensor:
    """Return exponent bytes, uint8, of float32 scales that are powers of two.

    Raises:
        CheckpointError: a scale is not a power of two and would have to be truncated.
    """
    mantissa, exponent = torch.frexp(scale)
    if not bool((mantissa == 0.5).all()):
        raise CheckpointError(f"{name} holds scales that are not powers of two")
    return encode_ue8m0(exponent - 1)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Weights:
    """Verify a checkpoint against its configuration, and return a reader of its tensors.

    Args:
        checkpoint: files of the checkpoint.
        config: configuration in the same directory, see ``drafts.present_config``.
        device: device of the tensors.
        progress: True to show a progress bar on stderr.

    Raises:
        CheckpointError: a tensor is missing, unexpected, mis-shaped, of a wrong dtype or stored in
            an unreadable way; the message is one line that names it.
    """
    require_loadable(checkpoint, config)
    return Weights(checkpoint, block=config.family.weight_block, device=device, progress=progress)
