"""The registry of cache page layouts; ``anymla.formats.pages`` defines a layout."""

from __future__ import annotations

import torch

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.formats.pages import PageLayout
from anymla.formats.records import (
    InlineFp8Layout,
    PlainRowsLayout,
    RowFp8Layout,
    RowMxfp4Layout,
    RowNvfp4Layout,
    SplitFp8Layout,
)


def _plain_rows(dtype: torch.dtype, channels: int) -> PlainRowsLayout:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return PlainRowsLayout(
        layout_id=f"rows_{name}_{channels}",
        dtype=dtype,
        row_elements=channels,
        channels=channels,
        data_bytes=channels * dtype.itemsize,
        scale_bytes=0,
        alignment=512,
    )


def _v41_main(layout_id: str, *, interleaved: bool) -> SplitFp8Layout:
    return SplitFp8Layout(
        layout_id=layout_id,
        dtype=torch.uint8,
        row_elements=528,
        channels=512,
        data_bytes=512,
        scale_bytes=16,
        alignment=512,
        nope=512,
        block=32,
        interleaved=interleaved,
    )


def _v41_compressed(layout_id: str, *, interleaved: bool) -> RowNvfp4Layout:
    return RowNvfp4Layout(
        layout_id=layout_id,
        dtype=torch.uint8,
        row_elements=288,
        channels=512,
        data_bytes=512 // 2,
        scale_bytes=512 // NVFP4_BLOCK,
        alignment=512,
        interleaved=interleaved,
    )


MAIN_FP8 = "v4_main_fp8"
V32_FP8 = "v32_main_fp8"
# DeepSeek-V4.1's layouts: interleaved as in FlashMLA since September 2026, and split as before.
V41_MAIN_FP8 = "v41_main_fp8"
V41_MAIN_FP8_SPLIT = "v41_main_fp8_split"
V41_COMPRESSED_NVFP4 = "v41_compressed_nvfp4"
V41_COMPRESSED_NVFP4_SPLIT = "v41_compressed_nvfp4_split"
INDEX_FP8 = "v4_index_fp8"
INDEX_MXFP4 = "v4_index_mxfp4"
ROWS_BF16_512 = "rows_bf16_512"
ROWS_FP32_512 = "rows_fp32_512"
ROWS_BF16_128 = "rows_bf16_128"
ROWS_FP32_128 = "rows_fp32_128"

# Layouts of DeepSeek-V4's main and index caches, plain rows for comparison included.
MAIN_LAYOUTS = (MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512)
V41_LAYOUTS = (
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
)
INDEX_LAYOUTS = (INDEX_FP8, INDEX_MXFP4, ROWS_BF16_128, ROWS_FP32_128)

_LAYOUTS: dict[str, PageLayout] = {
    layout.layout_id: layout
    for layout in (
        SplitFp8Layout(
            layout_id=MAIN_FP8,
            dtype=torch.uint8,
            row_elements=584,
            channels=512,
            data_bytes=576,
            scale_bytes=8,
            alignment=576,
            nope=448,
            block=64,
        ),
        InlineFp8Layout(
            layout_id=V32_FP8,
            dtype=torch.uint8,
            row_elements=656,
            channels=576,
            data_bytes=656,
            scale_bytes=0,
            alignment=16,
            nope=512,
            block=128,
        ),
        _v41_main(V41_MAIN_FP8, interleaved=True),
        _v41_main(V41_MAIN_FP8_SPLIT, interleaved=False),
        _v41_compressed(V41_COMPRESSED_NVFP4, interleaved=True),
        _v41_compressed(V41_COMPRESSED_NVFP4_SPLIT, interleaved=False),
        RowFp8Layout(
            layout_id=INDEX_FP8,
            dtype=torch.uint8,
            row_elements=132,
            channels=128,
            data_bytes=128,
            scale_bytes=4,
            alignment=576,
        ),
        RowMxfp4Layout(
            layout_id=INDEX_MXFP4,
            dtype=torch.uint8,
            row_elements=68,
            channels=128,
            data_bytes=128 // 2,
            scale_bytes=128 // MXFP4_BLOCK,
            alignment=512,
        ),
        _plain_rows(torch.bfloat16, 512),
        _plain_rows(torch.float32, 512),
        _plain_rows(torch.bfloat16, 128),
        _plain_rows(torch.float32, 128),
    )
}

LAYOUT_IDS = tuple(_LAYOUTS)


def get_layout(layout_id: str) -> PageLayout:
    """Return the layout of that name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    try:
        return _LAYOUTS[layout_id]
    except KeyError:
        known = ", ".join(sorted(_LAYOUTS))
        raise ValueError(f"unknown cache layout {layout_id!r}; known: {known}") from None
