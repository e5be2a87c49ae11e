"""Figures made of result rows; what has no rows has no figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from anymla.bench.page.figure import Bar, Bars, Figure, Point, Series, Stacks, line, scatter
from anymla.bench.page.layers import layer_parts
from anymla.bench.page.peers import peer_figure
from anymla.bench.page.reading import (
    batch_of,
    group_of,
    in_order,
    index_place,
    is_number,
    latest,
    own_us,
    part_of,
    series_of,
)
from anymla.bench.page.rows import Row, case_of, device_of, is_gpu, number_before, source
from anymla.bench.page.work import work_of

_CONTEXT_PART = "decode step against context"


def figures(rows: Sequence[Row]) -> list[Figure | Bars | Stacks]:
    """Every figure that the rows allow."""
    gpu = latest(row for row in rows if is_gpu(row))
    cpu = latest(row for row in rows if not is_gpu(row))
    made = [
        *_per_device(gpu, _roofline),
        *(each for some in _by_part(gpu) for each in _per_device(some, peer_figure)),
        *_per_device(gpu, _decode),
        *_per_device(gpu, _bandwidth),
        *_per_device(gpu, _index_selection),
        *_per_device(gpu, _index_parts),
        *_per_device(gpu, _layers),
        *_per_device(gpu, layer_parts),
        *_per_device(cpu, _context_speed),
        *_per_device(cpu, _context_memory),
    ]
    return [figure for figure in made if figure is not None]


def _by_part(rows: Sequence[Row]) -> list[list[Row]]:
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[part_of(row)].append(row)
    return list(parts.values())


def _per_device(
    rows: Sequence[Row], make: Callable[[list[Row]], Figure | Bars | Stacks | None]
) -> list[Figure | Bars | Stacks | None]:
    devices: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        devices[device_of(row)].append(row)
    return [make(some) for some in devices.values()]


def ceilings_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Measured bytes/s of a copy and flop/s of a bfloat16 product of a GPU's rows."""
    held = {case_of(row): row for row in rows if row.get("part") == "device"}
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
        label = f"{case_of(row)}: {us:.4g} us, {rate:.4g} TFLOP/s, {share:.0%} of the roof"
        groups[group_of(row)].append(Point(work.flops / work.bytes_moved, rate, label))
    series = [scatter(name, points) for name, points in groups.items()]
    lowest = min(point.x for points in groups.values() for point in points)
    highest = max(point.x for points in groups.values() for point in points)
    ridge = product / copy
    at = sorted({lowest, ridge, max(highest, ridge * 2)})
    roof = [Point(x, min(x * copy, product) / 1e12, "") for x in at]
    limit = Series(
        f"this device: {copy / 1e12:.2f} TB/s, {product / 1e12:.0f} TFLOP/s bf16, measured",
        tuple(roof),
        limit=True,
    )
    return Figure(
        "roofline",
        "How close to the roof",
        "floating-point operations a byte",
        "TFLOP/s",
        (*series, limit),
        source([*timed, *(row for row in rows if row.get("part") == "device")]),
        note="Bytes and operations are those that the call must move and do. Points on the line "
        "are as fast as this device copies or multiplies. FP8 products may lie above it.",
    )


def _decode(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if row.get("part") == "attention" and is_number(row.get("us"))]
    chosen = [row for row in chosen if "invariant" not in case_of(row)]
    groups: dict[str, list[Point]] = defaultdict(list)
    for row in chosen:
        heads, tokens = number_before("heads", case_of(row)), number_before("tokens", case_of(row))
        if heads is None or tokens is None:
            continue
        slots = case_of(row).rsplit(", ", 1)[-1]
        label = f"{case_of(row)}: {row['us']:g} us"
        groups[f"{heads:g} heads, {slots}"].append(Point(tokens, row["us"], label))
    groups = {name: points for name, points in groups.items() if len(points) > 1}
    if not groups:
        return None
    return Figure(
        "decode",
        "Attention over the FP8 cache, by batch",
        "tokens",
        "microseconds",
        tuple(line(name, points) for name, points in groups.items()),
        source(chosen),
        note="Lower is better. CUDA-graph replay, inputs not in the cache, medians.",
    )


def _bandwidth(rows: list[Row]) -> Bars | None:
    chosen = [row for row in rows if is_number(row.get("share_of_copy"))]
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
            case_of(row),
            row["share_of_copy"] * 100,
            f"{row['share_of_copy']:.0%}, {row['gb_per_s']:,.0f} GB/s, {row['us']:g} us",
            row.get("met") is False,
        )
        for row in ranked
    )
    return Bars(
        "bandwidth",
        "Operations that only move bytes, at their largest size",
        "percent of the measured copy",
        bars,
        most=100.0,
        goal=75.0,
        source=source(ranked),
        note="75 % was asked for where a line is drawn; what falls short of it is marked.",
    )


def _index_selection(rows: list[Row]) -> Figure | None:
    """The whole indexer in one operation."""
    return _index_keys(rows, "indexer", "Index selection by context", selects=True)


def _index_parts(rows: list[Row]) -> Figure | None:
    """Scores, and scores with a selection, as operations of their own."""
    return _index_keys(rows, "indexer-parts", "Index scores by context", selects=False)


def _index_keys(rows: list[Row], key: str, title: str, *, selects: bool) -> Figure | None:
    groups: dict[str, list[Point]] = defaultdict(list)
    chosen = []
    for row in rows:
        mine = own_us(row)
        place = index_place(row)
        if not part_of(row).startswith("indexer") or mine is None or place is None:
            continue
        group, keys = place
        if group.startswith("select") is selects:
            groups[group].append(Point(keys, mine, f"{case_of(row)}: {mine:g} us"))
            chosen.append(row)
    groups = {name: groups[name] for name in sorted(groups, key=in_order) if len(groups[name]) > 1}
    if not groups:
        return None
    return Figure(
        key,
        title,
        "entries (a quarter of the tokens)",
        "microseconds",
        tuple(line(name, points) for name, points in groups.items()),
        source(chosen),
        note="Lower is better. 256k entries are a context of a million tokens.",
    )


def _layers(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if is_number(row.get("roofline_us")) and batch_of(row)]
    groups: dict[str, list[Point]] = defaultdict(list)
    for row in chosen:
        label = f"{case_of(row)}: {row['us']:g} us, the roof is {row['roofline_us']:g} us"
        name = series_of(row) + (", on two queues" if row.get("side_stream") else "")
        groups[name].append(Point(batch_of(row) or 1, row["us"], label))
    if not groups:
        return None
    return Figure(
        "layer",
        "A whole decode layer, by batch",
        "requests",
        "microseconds",
        tuple(line(name, points) for name, points in groups.items()),
        source(chosen),
        note="Attention, indexer, caches, projections, hyper-connections and experts of one layer.",
    )


def _context_speed(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if str(row.get("part", "")).startswith(_CONTEXT_PART)]
    points = [
        Point(
            tokens,
            row["decode_ms"],
            f"{case_of(row)}: {row['decode_ms']:.1f} ms",
            row.get("decode_ms_p10"),
            row.get("decode_ms_p90"),
        )
        for row in chosen
        if (tokens := number_before("tokens", case_of(row))) is not None
    ]
    if len(points) < 2:
        return None
    return Figure(
        "context",
        "A decode step against the context",
        "tokens of context",
        "milliseconds",
        (
            line(
                "tiny model of four layers, FP8 cache; bars are the 10th to 90th percentile", points
            ),
        ),
        source(chosen),
        note="Only the indexer and the layers of ratio 128 look at more when the context grows.",
        log_y=False,
    )


def _context_memory(rows: list[Row]) -> Figure | None:
    chosen = [row for row in rows if str(row.get("part", "")).startswith(_CONTEXT_PART)]
    points = [
        Point(tokens, row["cache_mb"], f"{case_of(row)}: {row['cache_mb']:.1f} MB")
        for row in chosen
        if is_number(row.get("cache_mb"))
        and (tokens := number_before("tokens", case_of(row))) is not None
    ]
    if len(points) < 2:
        return None
    return Figure(
        "memory",
        "Cache memory against the context",
        "tokens of context",
        "MB",
        (line("tiny model of four layers, FP8 cache", points),),
        source(chosen),
        note="The window and the compressor's state do not grow.",
        log_y=False,
    )
