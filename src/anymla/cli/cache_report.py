"""The report of ``anymla inspect --cache`` as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymla.formats.cache_check import check_cache_bytes
from anymla.formats.cache_dump import load_cache, read_page, save_cache
from anymla.formats.convert import convert_cache
from anymla.formats.interchange import dump_layout
from anymla.formats.pages import PageLayout
from anymla.ops.memory import require_memory


@dataclasses.dataclass(frozen=True)
class Dump:
    """A cache in a file.

    Attributes:
        path: path of the file.
        cache: [P, B, row_elements], pages in ``layout``.
        layout: layout of the cache.
        meta: JSON values stored with it.
    """

    path: Path
    cache: Tensor
    layout: PageLayout
    meta: dict[str, Any]

    @property
    def rows(self) -> int:
        """Number of final slots; all of them if the dump does not say.

        Later slots of the last page are undefined.
        """
        slots = self.cache.shape[0] * self.cache.shape[1]
        rows = self.meta.get("rows", slots)
        return rows if type(rows) is int and 0 <= rows <= slots else slots

    def read(self, first: int, count: int) -> Tensor:
        """Decode rows to float64 [count, channels]."""
        return self.layout.read(self.cache, torch.arange(first, first + count), torch.float64)


def open_dump(path: Path, page_layout: str | None = None, entries: int | None = None) -> Dump:
    """Read a dump, or with ``page_layout`` and ``entries`` a file of one page's bytes.

    Raises:
        CacheDumpError: the file is neither, or cannot be read.
        ValueError: the layout is unknown, or is not the one in the dump's header.
        NotEnoughMemory: the cache is larger than this machine can decode.
    """
    if entries is not None:
        if page_layout is None:
            raise ValueError("--entries is for a page's bare bytes: name its --layout as well")
        return Dump(path, read_page(path, page_layout, entries), dump_layout(page_layout), {})
    if path.is_file():
        # The file is mapped and then copied.
        require_memory(f"reading {path}", {"pages": path.stat().st_size})
    cache, layout_id, meta = load_cache(path)
    if page_layout is not None and page_layout != layout_id:
        raise ValueError(f"{path}: holds layout {layout_id}, not {page_layout}")
    layout = dump_layout(layout_id)
    # Values are decoded to float64, and the finite ones copied once more.
    decoded = 2 * 8 * cache.shape[0] * cache.shape[1] * layout.channels
    require_memory(f"decoding {path}", {"rows": decoded})
    return Dump(path, cache, layout, meta)


def cache_report(dump: Dump) -> dict[str, Any]:
    """Describe a dumped cache in JSON values."""
    cache, layout, path, meta, final = dump.cache, dump.layout, dump.path, dump.meta, dump.rows
    pages, entries = cache.shape[:2]
    data, scales = layout.planes(cache)
    decoded = layout.read(cache, torch.arange(final), torch.float64)
    return {
        "file": str(path),
        "layout_id": layout.layout_id,
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


def problem_report(dump: Dump) -> list[dict[str, Any]]:
    """Describe the problems of a cache's bytes in JSON values."""
    problems = check_cache_bytes(dump.cache, dump.layout, dump.rows)
    return [dataclasses.asdict(problem) for problem in problems]


def difference_report(one: Dump, other: Dump) -> dict[str, Any]:
    """Compare two dumps row by row in any layouts and page sizes, in JSON values.

    Raises:
        ValueError: their rows have different widths.
    """
    if one.layout.channels != other.layout.channels:
        raise ValueError(
            f"{one.path} holds rows of {one.layout.channels} channels, {other.path} of "
            f"{other.layout.channels}"
        )
    count = min(one.rows, other.rows)
    mine, theirs = one.read(0, count), other.read(0, count)
    wrong = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    rows = wrong.any(1)
    difference = (mine - theirs).abs()[wrong]
    finite = difference[difference.isfinite()]
    report: dict[str, Any] = {
        "file": str(one.path),
        "other": str(other.path),
        "rows": [one.rows, other.rows],
        "rows_compared": count,
        "rows_that_differ": int(rows.sum()),
        "values_that_differ": int(wrong.sum()),
        "largest_difference": float(finite.max()) if finite.numel() else 0.0,
        "equal": not bool(wrong.any()) and one.rows == other.rows,
        "first": None,
    }
    if wrong.any():
        slot, channel = (int(place) for place in wrong.nonzero()[0])
        values = [float(each[slot, channel]) for each in (mine, theirs)]
        report["first"] = {"slot": slot, "channel": channel, "values": [str(v) for v in values]}
    return report


def write_converted(dump: Dump, layout_id: str, output: Path) -> dict[str, Any]:
    """Convert and write a dump, and report in JSON values; nothing is written on failure.

    Raises:
        ValueError: the layout is unknown, or its rows have another width.
    """
    source = dump.layout.layout_id
    cache, loss = convert_cache(dump.cache, source, layout_id, dump.rows)
    meta = dump.meta | {"rows": dump.rows, "converted_from": source}
    save_cache(output, cache, layout_id, meta)
    return {
        "file": str(dump.path),
        "output": str(output),
        "from": source,
        "to": layout_id,
        "rows": dump.rows,
        "bytes": output.stat().st_size,
        **dataclasses.asdict(loss),
    }


def _values(decoded: Tensor) -> dict[str, Any]:
    """Count values, with statistics of the finite ones (None without any)."""
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
    """Return the smallest and largest byte."""
    return [int(values.min()), int(values.max())] if values.numel() else None
