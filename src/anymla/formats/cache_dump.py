"""A cache on disk: a safetensors file with the pages as they lie in memory and the layout's id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anymla.formats.page_layout import get_layout, pages_of

_VERSION = "1"


class CacheDumpError(ValueError):
    """A dump that cannot be read; the message is one line that names the file."""


def save_cache(
    path: str | Path, cache: Tensor, layout_id: str, meta: dict[str, Any] | None = None
) -> None:
    """Write a cache with its page stride.

    Args:
        path: file to write.
        cache: [P, B, row_elements] in ``layout_id``.
        layout_id: stored in the header and compared when read.
        meta: JSON values kept with it.

    Raises:
        TypeError, ValueError: ``cache`` does not fit the layout.
    """
    layout = get_layout(layout_id)
    layout.check(cache, "save_cache", "cache")
    cache = pages_of(cache)
    pages, entries = cache.shape[:2]
    stride = cache.stride(0) * layout.dtype.itemsize
    # The last page of a strided view may end before its padding does; never read past it.
    used = entries * layout.entry_bytes
    flat = torch.zeros(pages, max(stride, used), dtype=torch.uint8)
    data, scales = layout.planes(cache)
    flat[:, : entries * layout.data_bytes] = data.flatten(1).cpu()
    if scales is not None:
        flat[:, entries * layout.data_bytes : used] = scales.flatten(1).cpu()
    header = {
        "format": "anymla-cache",
        "version": _VERSION,
        "layout_id": layout_id,
        "entries_per_page": str(entries),
        "meta": json.dumps(meta or {}),
    }
    save_file({"pages": flat}, path, metadata=header)


def load_cache(path: str | Path) -> tuple[Tensor, str, dict[str, Any]]:
    """Read a dump.

    Returns:
        The cache [P, B, row_elements], its layout id, and the JSON values kept with it.

    Raises:
        CacheDumpError: missing, truncated, not a dump, or of an unknown layout.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != "anymla-cache":
                raise CacheDumpError(f"{path}: not a cache dump")
            if header.get("version") != _VERSION:
                raise CacheDumpError(f"{path}: dump version {header.get('version')}, can read 1")
            flat = file.get_tensor("pages")
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise CacheDumpError(f"{path}: cannot be read as a cache dump: {reason}") from None
    try:
        layout = get_layout(header["layout_id"])
        entries = int(header["entries_per_page"])
        meta = json.loads(header["meta"])
    except (KeyError, ValueError) as error:
        raise CacheDumpError(f"{path}: bad header: {error}") from None
    if flat.ndim != 2 or flat.dtype != torch.uint8 or entries < 1:
        raise CacheDumpError(f"{path}: bad pages {flat.dtype} {list(flat.shape)}")
    if flat.shape[1] < entries * layout.entry_bytes or flat.shape[1] % layout.dtype.itemsize:
        raise CacheDumpError(
            f"{path}: pages of {flat.shape[1]} bytes cannot hold {entries} entries "
            f"of layout {layout.layout_id}"
        )
    itemsize = layout.dtype.itemsize
    cache = (
        flat.clone()
        .flatten()
        .view(layout.dtype)
        .as_strided(
            (flat.shape[0], entries, layout.row_elements),
            (flat.shape[1] // itemsize, layout.row_elements, 1),
        )
    )
    return cache, header["layout_id"], meta
