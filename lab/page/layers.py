"""Time of decode layers by family of kernels, as a figure and as a Markdown table."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

from lab.page.figure import Stack, Stacks
from lab.page.reading import microseconds
from lab.page.rows import MODELS, Row, case_of, device_of, is_gpu, of_part, source

_CASE = re.compile(r"(\w+), ratio (\d+), batch (\d+), context (\d+)$")
# Families of kernels in the order of the legend, with the words that it has for them.
_PARTS = {
    "moe": "experts",
    "linear": "linear layers",
    "hyper_connection": "hyper-connections",
    "indexer": "indexer",
    "attention": "attention",
    "compressor": "compressors",
    "torch": "cuBLAS, torch",
    "": "rest",
}
_DRAWN_CONTEXTS = (4096, 65536)
_OF_EXPERTS = re.compile(r"(\w+), ratio (\d+), batch (\d+), context (\d+), (\d+) experts$")


def layer_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows of decode layers, sorted by model, ratio, context and batch."""
    chosen = [
        row
        for row in of_part(rows, "decode layer")
        if "parts_us" in row and _CASE.match(case_of(row))
    ]
    return sorted(chosen, key=_place)


def _place(row: Row) -> tuple[str, int, int, int]:
    model, ratio, batch, context = _sizes(row)
    return model, {4: 0, 128: 1}.get(ratio, 2), context, batch


def _sizes(row: Row) -> tuple[str, int, int, int]:
    found = _CASE.match(case_of(row))
    assert found is not None
    return found[1], int(found[2]), int(found[3]), int(found[4])


def _parts(row: Row) -> list[float]:
    """Return the microseconds of each of ``_PARTS``; the last is the sum of all other kernels."""
    given = {str(name): float(us) for name, us in row["parts_us"].items()}
    named = [given.pop(name, 0.0) for name in _PARTS if name]
    return [*named, sum(given.values())]


def drawn_layers(rows: Sequence[Row]) -> list[Row]:
    """Return rows of decode layers at 4k of context for ratio 0 and at 64k for the others."""
    chosen = []
    for row in layer_rows(rows):
        _, ratio, _, context = _sizes(row)
        if context == _DRAWN_CONTEXTS[ratio > 0]:
            chosen.append(row)
    return chosen


def layer_parts(rows: Sequence[Row]) -> Stacks | None:
    """Plot the shares of each drawn layer's kernels; None if no layer was measured."""
    chosen = drawn_layers(rows)
    if not chosen:
        return None
    stacks = []
    for row in chosen:
        model, ratio, batch, _ = _sizes(row)
        *named, compressors, torch_us, rest = _parts(row)
        text = f"{row['us']:,.0f} us, roof {row['roofline_us']:,.0f}"
        name = f"{MODELS[model]}, ratio {ratio}, {batch} request{'s' if batch > 1 else ''}"
        stacks.append(Stack(name, (*named, compressors + torch_us + rest), text))
    return Stacks(
        key="layer-parts",
        title="Where the time of a decode layer goes",
        x_label="percent of the kernels' time",
        parts=(*list(_PARTS.values())[:5], "rest"),
        stacks=tuple(stacks),
    )


def usual_layer_parts(rows: Sequence[Row]) -> Stacks | None:
    """Plot the layers of one GPU: of those with measured layers, the one with most rows."""
    devices = collections.Counter(device_of(row) for row in rows if is_gpu(row))
    for device, _ in devices.most_common():
        if plot := layer_parts([row for row in rows if is_gpu(row) and device_of(row) == device]):
            return plot
    return None


def layer_table(rows: Sequence[Row]) -> list[str]:
    """Return Markdown lines: each measured layer beside the same layer of others' kernels."""
    head = ["layer", "context", "batch", "us", "others", "times", "launches", "roofline", "%"]
    head += _PARTS.values()
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    chosen = layer_rows(rows)
    for row in chosen:
        model, ratio, batch, context = _sizes(row)
        others, times = row.get("others_us"), row.get("times_others")
        slower = isinstance(times, float) and times < 1
        cells = [
            f"{MODELS[model]}, ratio {ratio}",
            f"{context:,}",
            str(batch),
            microseconds(row["us"]),
            "" if others is None else microseconds(others),
            "" if times is None else f"**{times:.2f} slower**" if slower else f"{times:.2f}",
            str(row["launches"]),
            microseconds(row["roofline_us"]),
            f"{100 * row['roofline_us'] / row['us']:.0f}",
            *(microseconds(us) for us in _parts(row)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"({source(chosen)})"] if chosen else []


def experts_table(rows: Sequence[Row]) -> list[str]:
    """Return Markdown lines with times of layers with many experts, and of reading their bytes.

    "Read" is the time that the bytes take at the copy rate of the same process. "Adds" is by how
    much later a layer ends by kernels, in a trace of replays; "idle" is the time in it without any.
    """
    head = ["layer", "context", "requests", "us", "read", "experts read", "experts add"]
    head += ["rest read", "rest adds", "idle", "launches"]
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    traced = {case_of(row): row for row in of_part(rows, "decode layer, timeline")}
    chosen = []
    for row in of_part(rows, "decode layer"):
        found, trace = _OF_EXPERTS.match(case_of(row)), traced.get(case_of(row))
        if found is None or trace is None or "experts_mb" not in row:
            continue
        chosen.append(row)
        read = float(row["roofline_us"])
        share = row["experts_mb"] / (row["weights_mb"] + row["caches_mb"])
        adds = dict(trace["adds_us"])
        experts = float(adds.pop("moe", 0.0))
        cells = [
            f"{MODELS[found[1]]}, ratio {found[2]}, {found[5]} experts",
            f"{int(found[4]):,}",
            found[3],
            *map(microseconds, (row["us"], read, read * share, experts)),
            *map(microseconds, (read * (1 - share), sum(adds.values()), trace["idle_us"])),
            str(row["launches"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"({source(chosen)})"] if chosen else []
