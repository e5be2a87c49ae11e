"""What ``anymla inspect --cache`` says, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymla.formats.cache_dump import load_cache
from anymla.formats.page_layout import get_layout


def cache_report(path: Path) -> dict[str, Any]:
    """Describe a dumped cache; JSON values only.

    Where the dump says how many of its rows are final, only those are counted: what follows in the
    last page belongs to nobody.

    Raises:
        CacheDumpError: not a dump, or one that cannot be read.
    """
    cache, layout_id, meta = load_cache(path)
    layout = get_layout(layout_id)
    pages, entries = cache.shape[:2]
    rows = meta.get("rows", pages * entries)
    final = rows if isinstance(rows, int) and 0 <= rows <= pages * entries else pages * entries
    data, scales = layout.planes(cache)
    decoded = layout.read(cache, torch.arange(final), torch.float64)
    return {
        "file": str(path),
        "layout_id": layout_id,
        "meta": meta,
        "pages": pages,
        "entries_per_page": entries,
        "page_stride_bytes": cache.stride(0) * layout.dtype.itemsize,
        "data_bytes": layout.data_bytes,
        "scale_bytes": layout.scale_bytes,
        "rows": final,
        "channels": layout.channels,
        "decoded": _values(decoded),
        "zero_rows": int((decoded == 0).all(1).sum()),
        "nan_rows": int(decoded.isnan().any(1).sum()),
        "data_byte_range": _range(data.flatten(0, 1)[:final]),
        "scale_byte_ranges": (
            None
            if scales is None
            else [_range(column) for column in scales.flatten(0, 1)[:final].unbind(1)]
        ),
    }


def _values(decoded: Tensor) -> dict[str, Any]:
    """Counts, and statistics of the finite values (None if there are none)."""
    finite = decoded[decoded.isfinite()]
    some = finite.numel() > 0
    return {
        "nan": int(decoded.isnan().sum()),
        "inf": int(decoded.isinf().sum()),
        "min": float(finite.min()) if some else None,
        "max": float(finite.max()) if some else None,
        "mean": float(finite.mean()) if some else None,
        "rms": float(finite.square().mean().sqrt()) if some else None,
    }


def _range(values: Tensor) -> list[int] | None:
    """Smallest and largest byte."""
    return [int(values.min()), int(values.max())] if values.numel() else None
