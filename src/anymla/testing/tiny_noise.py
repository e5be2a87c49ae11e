"""Random numbers with the same bytes on every machine and with every version of torch."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

# Standard deviation of the sum of four uniform bytes.
_SPREAD = math.sqrt(4 * (256**2 - 1) / 12)


class Noise:
    """Independent streams by name, so that a tensor's values do not depend on other draws.

    Only the raw stream of PCG64, which numpy guarantees, and exact arithmetic are used: samplers
    of normal numbers differ between processors and versions.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int) -> Tensor:
        """Draw roughly normal float32 numbers, mean 0, deviation 1, never beyond 3.46."""
        words = self._words(name, math.prod(shape))
        pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
        total = ((pairs & 0xFFFF) + (pairs >> 16)).astype(np.float32)
        return torch.from_numpy((total - np.float32(510)) / np.float32(_SPREAD)).view(shape)

    def distinct(self, name: str, rows: int, count: int, below: int) -> Tensor:
        """Draw ``count`` different integers 0 .. below - 1 in each row, int64 [rows, count]."""
        keys = self._words(name, rows * below).reshape(rows, below)
        return torch.from_numpy(np.argsort(keys, axis=1, kind="stable")[:, :count].copy())

    def _words(self, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        raw = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(-(-count // 2))
        return raw.astype("<u8", copy=False).view("<u4")[:count]
