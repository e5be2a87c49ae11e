"""A cache on disk: a safetensors file with the pages as in memory and the layout's id."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anymla.formats.files import naming
from anymla.formats.interchange import dump_layout
from anymla.formats.pages import PageLayout, pages_of
from anymla.formats.untrusted import Refused, open_file, parse_object, read_bytes

_VERSION = "1"


class CacheDumpError(ValueError):
    """A dump that cannot be read or written; the message is one line that names the file."""


def save_cache(
    path: str | Path, cache: Tensor, layout_id: str, meta: dict[str, Any] | None = None
) -> None:
    """Write a cache with its page stride; the file appears whole or not at all.

    Args:
        path: file to write.
        cache: [P, B, row_elements], pages in ``layout_id``.
        layout_id: id of the layout, stored in the header and compared when read.
        meta: JSON values that are stored with the cache.

    Raises:
        TypeError, ValueError: ``cache`` does not fit the layout.
        CacheDumpError, OSError: the file cannot be written.
    """
    layout = dump_layout(layout_id)
    layout.check(cache, "save_cache", "cache")
    cache = pages_of(cache)
    pages, entries = cache.shape[:2]
    stride = cache.stride(0) * layout.dtype.itemsize
    # The last page of a strided view may end before its padding; never read past it.
    used = entries * layout.entry_bytes
    flat = torch.zeros(pages, max(stride, used), dtype=torch.uint8)
    copy = _as_cache(flat, layout, entries)
    for empty, plane in zip(layout.planes(copy), layout.planes(cache), strict=True):
        if empty is not None and plane is not None:
            empty.copy_(plane)
    header = {
        "format": "anymla-cache",
        "version": _VERSION,
        "layout_id": layout_id,
        "entries_per_page": str(entries),
        "meta": json.dumps(meta or {}),
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            save_file({"pages": flat}, temporary, metadata=header)
        os.replace(temporary, target)
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        raise CacheDumpError(f"{path}: cannot be written: {reason}") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_page(path: str | Path, layout_id: str, entries: int) -> Tensor:
    """Read the bytes of one page, as an engine's memory holds them.

    Args:
        path: file with one page; bytes after its entries are padding.
        layout_id: id of the page's layout, which the file does not name.
        entries: B, number of entries of the page.

    Returns:
        [1, B, row_elements] cache of one page.

    Raises:
        CacheDumpError: the file is missing, or too short for a page of that layout.
        ValueError: the layout is unknown, or entries is below 1.
    """
    layout = dump_layout(layout_id)
    if entries < 1:
        raise ValueError(f"read_page: entries must be at least 1, got {entries}")
    try:
        held = read_bytes(Path(path))
    except OSError as error:
        raise CacheDumpError(f"{path}: cannot be read: {error.strerror}") from None
    except Refused as error:
        raise CacheDumpError(f"{path}: cannot be a page: {error}") from None
    needed = entries * layout.entry_bytes
    if len(held) < needed:
        raise CacheDumpError(
            f"{path}: {len(held)} bytes, but {entries} entries of layout {layout_id} take {needed}"
        )
    held += bytes(-len(held) % layout.dtype.itemsize)
    flat = torch.frombuffer(bytearray(held), dtype=torch.uint8).view(layout.dtype)
    return flat.as_strided((1, entries, layout.row_elements), (len(flat), layout.row_elements, 1))


def load_cache(path: str | Path) -> tuple[Tensor, str, dict[str, Any]]:
    """Read a dump from a file.

    Returns:
        The cache [P, B, row_elements], its layout id, and the JSON values kept with it.

    Raises:
        CacheDumpError: the file is missing, truncated, not a dump, or of an unknown layout.
    """
    try:
        open_file(path).close()  # safe_open would wait for the writer of a pipe
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != "anymla-cache":
                raise CacheDumpError(f"{path}: not a cache dump")
            if header.get("version") != _VERSION:
                raise CacheDumpError(f"{path}: dump version {header.get('version')}, can read 1")
            flat = file.get_tensor("pages")
    except (OSError, SafetensorError, Refused) as error:
        reason = str(error).splitlines()[0]
        raise CacheDumpError(f"{path}: cannot be read as a cache dump: {reason}") from None
    try:
        layout = dump_layout(header["layout_id"])
        entries = int(header["entries_per_page"])
        meta = parse_object(header["meta"])
    except (KeyError, ValueError) as error:
        raise CacheDumpError(f"{path}: bad header: {error}") from None
    if flat.ndim != 2 or flat.dtype != torch.uint8 or entries < 1:
        raise CacheDumpError(f"{path}: bad pages {flat.dtype} {list(flat.shape)}")
    if flat.shape[1] < entries * layout.entry_bytes or flat.shape[1] % layout.dtype.itemsize:
        raise CacheDumpError(
            f"{path}: pages of {flat.shape[1]} bytes cannot hold {entries} entries "
            f"of layout {layout.layout_id}"
        )
    return _as_cache(flat.clone(), layout, entries), header["layout_id"], meta


def _as_cache(flat: Tensor, layout: PageLayout, entries: int) -> Tensor:
    """View pages uint8 [P, stride] as a cache [P, B, row_elements]."""
    size = (flat.shape[0], entries, layout.row_elements)
    strides = (flat.shape[1] // layout.dtype.itemsize, layout.row_elements, 1)
    return flat.flatten().view(layout.dtype).as_strided(size, strides)
