"""Named real shapes of norms, RoPE and insertion, for builds, benchmarks and tests."""

from __future__ import annotations

import dataclasses
import itertools

from anymla.formats.page_layout import (
    MAIN_FP8,
    MAIN_LAYOUTS,
    ROWS_FP32_512,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of the rows of one model.

    Attributes:
        hidden: channels of the residual stream.
        q_rank: channels of the query latent.
        heads: number of query heads.
        channels: number of channels of a head and of a key-value row.
        index_channels: number of channels of an index head and of an index key.
        rope: number of trailing channels of a head that rotate.
        page_size: number of entries in a page of the main cache.
    """

    hidden: int
    q_rank: int
    heads: int
    channels: int
    index_channels: int
    rope: int
    page_size: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of channels of all rows that are normed."""
        return self.index_channels, self.channels, self.q_rank, self.hidden


V4_FLASH = ModelShape(4096, 1024, 64, 512, 128, 64, 64)
V4_PRO = ModelShape(7168, 1536, 128, 512, 128, 64, 64)
MODELS = (V4_FLASH, V4_PRO)
# Heads of a rank: as tensor parallelism splits them, down to one, and all of V4-Flash's.
HEADS = (1, 2, 4, 8, V4_FLASH.heads)


@dataclasses.dataclass(frozen=True)
class NormShape:
    """Dtypes of rows that are normed, and of the norm's weights.

    Attributes:
        dtype: Triton's name of the rows' dtype.
        weights: Triton's name of the weights' dtype.
    """

    dtype: str
    weights: str

    def __str__(self) -> str:
        return f"{self.dtype}, weights {self.weights}"


# Weights are float32 in our layers, and of the rows' dtype in vLLM's.
NORMS = (
    *(NormShape(dtype, "fp32") for dtype in ("bf16", "fp16", "fp32")),
    NormShape("bf16", "bf16"),
)


@dataclasses.dataclass(frozen=True)
class InsertShape:
    """Query heads and key-value rows of a step.

    Attributes:
        layout: identifier of the cache's layout.
        dtype: Triton's name of the dtype of heads and rows.
        heads: number of query heads.
    """

    layout: str
    dtype: str
    heads: int

    def __str__(self) -> str:
        return f"{self.heads} head{'s' * (self.heads > 1)}, {self.dtype}, into {self.layout}"


# V4's layout with all numbers of heads; the others, which need less, with a whole tile of heads.
INSERTS = (
    *(InsertShape(MAIN_FP8, *each) for each in itertools.product(("bf16", "fp32"), HEADS)),
    *(InsertShape(each, "bf16", n) for each in MAIN_LAYOUTS[1:] for n in HEADS[-2:]),
    InsertShape(MAIN_FP8, "fp16", V4_FLASH.heads),
    InsertShape(ROWS_FP32_512, "fp32", V4_FLASH.heads),
    *(InsertShape(each, "bf16", V4_FLASH.heads) for each in (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT)),
)
