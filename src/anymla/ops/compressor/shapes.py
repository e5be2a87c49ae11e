"""Compressors of released models, for builds, benchmarks and tests."""

from __future__ import annotations

import dataclasses

from anymla.formats.page_layout import INDEX_LAYOUTS, MAIN_LAYOUTS, V41_COMPRESSED_NVFP4
from anymla.ops.compressor.config import MOST_CTA_PER_TOKEN, MOST_PDL, Window


@dataclasses.dataclass(frozen=True)
class CompressorShape:
    """Sizes of one compressor and its caches.

    Attributes:
        window: window that an entry is compressed from.
        page_size: number of entries in a page of the cache, those of 256 tokens.
        layouts: layouts that its entries are stored in.
    """

    window: Window
    page_size: int
    layouts: tuple[str, ...]

    @property
    def label(self) -> str:
        """Short name of the shape for tables."""
        return f"ratio {self.window.ratio}, {self.window.channels} channels"


# DeepSeek-V4 Flash and Pro: entries of layers of ratio 4 and 128, and their index keys.
_ENTRY_LAYOUTS = (*MAIN_LAYOUTS, V41_COMPRESSED_NVFP4)
V4_RATIO4 = CompressorShape(Window(4, True, 512, 4), 64, _ENTRY_LAYOUTS)
V4_RATIO128 = CompressorShape(Window(128, False, 512, 8), 2, _ENTRY_LAYOUTS)
V4_INDEX = CompressorShape(Window(4, True, 128, 4), 64, INDEX_LAYOUTS)
SHAPES = (V4_RATIO4, V4_RATIO128, V4_INDEX)
# DeepSeek-V4.1's layers of ratio 2, which project index keys from entries; pages of 8 states.
V41_RATIO2 = Window(2, False, 512, 8)
ROPE_DIM = 64
# Numbers of tokens in a step, on both sides of every threshold of ``config``.
TOKENS = (1, MOST_CTA_PER_TOKEN, MOST_CTA_PER_TOKEN + 1, MOST_PDL, MOST_PDL + 1)
