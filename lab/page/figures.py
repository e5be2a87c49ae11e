"""Figures made of result rows; what has no rows has no figure."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from lab.page.figure import Bar, Bars, Figure, Plot, Point, Series, line, scatter
from lab.page.layers import drawn_layers, layer_parts
from lab.page.peers import decode_rows, peer_figure
from lab.page.reading import (
    batch_of,
    group_of,
    in_order,
    index_place,
    is_number,
    microseconds,
    own_us,
    part_of,
    series_of,
)
from lab.page.rows import Row, device_of, is_gpu, name_of, number_before, source
from lab.page.work import work_of

_CONTEXT_PART = "decode step against context"
_RETRIEVAL_PART = "retrieval of a passkey"


def figures(rows: Sequence[Row]) -> list[Plot]:
    """Every figure that the rows allow.

    Args:
        rows: those that count (``newest``).
    """
    gpu = [row for row in rows if is_gpu(row)]
    cpu = [row for row in rows if not is_gpu(row)]
    made = [
        *_per_device(gpu, _decode),
        *(each for some in _by_part(gpu) for each in _per_device(some, peer_figure)),
        *_per_device(gpu, _index_selection),
        *_per_device(gpu, _layers),
        *_per_device(gpu, _roofline),
        *_per_device(gpu, layer_parts),
        *_per_device(gpu, _bandwidth),
        *_per_device(cpu, _context_speed),
        *_per_device(cpu, _context_memory),
        *_per_device(rows, _retrieval),
    ]
    return _told_apart(made)


def _by_part(rows: Sequence[Row]) -> list[list[Row]]:
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[part_of(row)].append(row)
    return [parts[name] for name in sorted(parts)]


def _per_device(rows: Sequence[Row], make: Callable[[list[Row]], Plot | None]) -> list[Plot]:
    """A plot of each device's rows, if they make one; those behind the first name the device."""
    devices: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        devices[device_of(row)].append(row)
    ordered = sorted(devices, key=lambda name: -len(devices[name]))  # of most rows first
    made = [(name, plot) for name in ordered if (plot := make(devices[name])) is not None]
    return [
        dataclasses.replace(plot, title=f"{plot.title}, {name}") if place else plot
        for place, (name, plot) in enumerate(made)
    ]


def _told_apart(plots: Sequence[Plot]) -> list[Plot]:
    """The plots, those whose key came before with a number behind it."""
    seen: Counter[str] = Counter()
    told = []
    for plot in plots:
        seen[plot.key] += 1
        number = seen[plot.key]
        key = plot.key if number == 1 else f"{plot.key}-{number}"
        told.append(dataclasses.replace(plot, key=key))
    return told


def ceilings_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Measured bytes/s of a copy and flop/s of a bfloat16 product of a GPU's rows."""
    held = {name_of(row): row for row in rows if row.get("part") == "device"}
    copy, product = held.get("copy"), held.get("bf16 product 8192^3")
    if copy is None or product is None:
        return None
    return float(copy["tb_per_s"]) * 1e12, float(product["tflops"]) * 1e12


def _roofline(rows: list[Row]) -> Figure | None:
    ceilings = ceilings_of(rows)
    worked = [(row, us, work) for row in rows if (us := own_us(row)) and (work := work_of(row))]
    timed = [row for row, _, work in worked if work.flops]
    if ceilings is None or not timed:
        return None
    copy, product = ceilings
    groups: dict[str, list[Point]] = defaultdict(list)
    for row, us, work in worked:
        if not work.flops:
            continue
        rate, share = work.flops / us / 1e6, work.share(us, copy, product)
        label = f"{name_of(row)}: {us:.4g} us, {rate:.4g} TFLOP/s, {share:.0%} of the roof"
        groups[group_of(row)].append(Point(work.flops / work.bytes_moved, rate, label))
    series = [scatter(name, points) for name, points in groups.items()]
    lowest = min(point.x for points in groups.values() for point in points)
    highest = max(point.x for points in groups.values() for point in points)
    ridge = product / copy
    at = sorted({lowest, ridge, max(highest, ridge * 2)})
    roof = [Point(x, min(x * copy, product) / 1e12, "") for x in at]
    limit = Series(
        "roof",
        tuple(roof),
        limit=True,
    )
    return Figure(
        key="roofline",
        title="How close to the roof",
        x_label="floating-point operations a byte",
        y_label="TFLOP/s",
        series=(*series, limit),
        source=source([*timed, *(row for row in rows if row.get("part") == "device")]),
        note="The roof is what this device was measured to copy and multiply in bfloat16: "
        f"{copy / 1e12:.2f} TB/s, {product / 1e12:.0f} TFLOP/s. Bytes and operations are those "
        "that the call must move and do; FP8 products may lie above it.",
    )


def _decode(rows: list[Row]) -> Figure | None:
    """Times of decode attention themselves, where they are also compared."""
    chosen = decode_rows(rows)
    groups: dict[int, list[Point]] = defaultdict(list)
    for row in chosen:
        us = own_us(row) or 0.0
        groups[row["heads"]].append(Point(row["batch"], us, f"{name_of(row)}: {us:.3g} us"))
    series = [
        line(f"{heads} heads", groups[heads]) for heads in sorted(groups) if len(groups[heads]) > 1
    ]
    if not series:
        return None
    return Figure(
        key="decode",
        title="Decode attention by batch",
        x_label="requests, one query each",
        source=source(chosen),
        note="Lower is better. 128 + 512 slots, 128 + 1024 for 128 heads. CUDA-graph replay, "
        "inputs not in the L2 cache, medians.",
        y_label="microseconds",
        series=tuple(series),
    )


def _bandwidth(rows: list[Row]) -> Bars | None:
    chosen = [row for row in rows if is_number(row.get("share_of_copy"))]
    chosen = [row for row in chosen if "share_of_copy" in str(row.get("target"))]
    chosen = [row for row in chosen if not is_number(row.get("tflops")) and batch_of(row)]
    largest: dict[str, Row] = {}
    for row in chosen:
        known = largest.get(series_of(row))
        if known is None or (batch_of(row) or 0) > (batch_of(known) or 0):
            largest[series_of(row)] = row
    if not largest:
        return None
    ranked = sorted(largest.values(), key=lambda row: -float(row["share_of_copy"]))
    bars = tuple(
        Bar(
            series_of(row),
            row["share_of_copy"] * 100,
            f"{row['share_of_copy']:.0%}, {microseconds(row['us'])} us",
            row.get("met") is False,
        )
        for row in ranked
    )
    return Bars(
        key="bandwidth",
        title="Operations that only move bytes, at their largest size",
        x_label="percent of the measured copy",
        bars=bars,
        most=100.0,
        goal=75.0,
        source=source(ranked),
        note="75 % was asked for (the mark in each bar); what falls short of it is red and bold.",
    )


def _index_selection(rows: list[Row]) -> Figure | None:
    """The whole indexer in one operation, one query a request."""
    groups: dict[str, list[Point]] = defaultdict(list)
    chosen = []
    for row in rows:
        mine, place = own_us(row), index_place(row)
        if not part_of(row).startswith("indexer") or mine is None or place is None:
            continue
        group, keys = place
        groups[group].append(Point(keys, mine, f"{name_of(row)}: {mine:g} us"))
        chosen.append(row)
    groups = {name: groups[name] for name in sorted(groups, key=in_order) if len(groups[name]) > 1}
    if not groups:
        return None
    return Figure(
        key="indexer",
        title="Index selection by context",
        x_label="entries (a quarter of the tokens)",
        source=source(chosen),
        note="Lower is better: scores and the best 512, straight from the cache. 256k entries are "
        "a context of a million tokens.",
        y_label="microseconds",
        series=tuple(line(name, points) for name, points in groups.items()),
    )


def _layers(rows: list[Row]) -> Figure | None:
    """Layers at one context a ratio."""
    chosen = drawn_layers(rows)
    groups: dict[str, list[Point]] = defaultdict(list)
    for row in chosen:
        label = f"{name_of(row)}: {row['us']:g} us, the roof is {row['roofline_us']:g} us"
        name = re.sub(r", context \d+$", "", series_of(row))
        groups[name].append(Point(batch_of(row) or 1, row["us"], label))
    if not groups:
        return None
    return Figure(
        key="layer",
        title="A whole decode layer by batch",
        x_label="requests",
        source=source(chosen),
        note="Lower is better. Attention, indexer, caches, projections, hyper-connections and "
        "experts of one layer at 64k tokens of context (ratio 0 sees its window only).",
        y_label="microseconds",
        series=tuple(line(name, points) for name, points in groups.items()),
    )


def _context_speed(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if str(row.get("part", "")).startswith(_CONTEXT_PART)]
    points = [
        Point(
            tokens,
            row["decode_ms"],
            f"{name_of(row)}: {row['decode_ms']:.1f} ms",
            row.get("decode_ms_p10"),
            row.get("decode_ms_p90"),
        )
        for row in chosen
        if (tokens := number_before("tokens", name_of(row))) is not None
    ]
    if len(points) < 2:
        return None
    return Figure(
        key="context",
        title="A decode step of a tiny model against the context, on a CPU core",
        x_label="tokens of context",
        y_label="milliseconds",
        series=(line("four layers", points),),
        source=source(chosen),
        note="FP8 cache; bars are the 10th to 90th percentile. Only the indexer and the layers of "
        "ratio 128 look at more when the context grows.",
        log_y=False,
    )


def _retrieval(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if row.get("part") == _RETRIEVAL_PART]
    cells: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in chosen:
        broken = "nothing broken" if row["fault"] == "none" else str(row["fault"])
        engine = row.get("engine", "anymla")
        name = broken if engine == "anymla" else str(engine)
        cells[name][int(row["length"])].append(row)
    if not cells:
        return None
    shares = {
        name: {length: _share_found(some) for length, some in lengths.items()}
        for name, lengths in cells.items()
    }
    series = []
    for names in _alike(shares):
        lengths = cells[names[0]]
        points = []
        for length, some in sorted(lengths.items()):
            lost = [f"{row['depth']:g}" for row in some if not row["found"]]
            where = f"; lost at depths {', '.join(lost)}" if lost else ""
            found = f"{len(some) - len(lost)} of {len(some)} found{where}"
            points.append(
                Point(length, _share_found(some), f"{names[0]}, {length} tokens: {found}")
            )
        shown = [
            name if len(cells[name]) == len(lengths) else f"{name} (to {max(cells[name]):,})"
            for name in names
        ]
        series.append(line("; ".join(shown), points))
    tries = sorted({len(some) for lengths in cells.values() for some in lengths.values()})
    return Figure(
        key="retrieval",
        title="Passkeys that the trained tiny model finds, right and with one thing broken",
        x_label="tokens of text",
        y_label=f"% found, of {' or '.join(map(str, tries))} depths",
        series=tuple(series),
        source=source(chosen),
        note="What shares a line finds as many at each length. Every fault answers from a copy of "
        "the same caches. An answer does not notice a missing sink, or a window that is short by "
        "one; the conformance cases and the float64 oracle do.",
        log_y=False,
    )


def _share_found(rows: Sequence[Row]) -> float:
    return 100 * sum(bool(row["found"]) for row in rows) / len(rows)


def _alike(shares: dict[str, dict[int, float]]) -> list[list[str]]:
    """Names whose numbers agree wherever both have any; who has most of them comes first."""
    groups: list[list[str]] = []
    for name in sorted(shares, key=lambda name: -len(shares[name])):
        mine = shares[name].items()
        same = (group for group in groups if mine <= shares[group[0]].items())
        group = next(same, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def _context_memory(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if str(row.get("part", "")).startswith(_CONTEXT_PART)]
    points = [
        Point(tokens, row["cache_mb"], f"{name_of(row)}: {row['cache_mb']:.1f} MB")
        for row in chosen
        if is_number(row.get("cache_mb"))
        and (tokens := number_before("tokens", name_of(row))) is not None
    ]
    if len(points) < 2:
        return None
    return Figure(
        key="memory",
        title="Cache memory of a tiny model against the context",
        x_label="tokens of context",
        y_label="MB",
        series=(line("four layers", points),),
        source=source(chosen),
        note="FP8 cache. The window and the compressor's state do not grow.",
        log_y=False,
    )
