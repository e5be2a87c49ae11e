"""The report of ``anymla inspect --cache`` as lines of text."""

from __future__ import annotations

from typing import Any

from anymla.cli.cache_report import Dump


def problem_lines(problems: list[dict[str, Any]]) -> list[str]:
    """Format one line per problem; harmless ones are marked."""
    if not problems:
        return ["verified: nothing wrong"]
    lines = []
    for each in problems:
        mark = "note" if each["harmless"] else "BAD "
        lines.append(
            f"{mark} {each['kind']}: {each['count']} {each['text']}; first {each['first']}"
        )
    if all(each["harmless"] for each in problems):
        lines.append("verified: nothing that a reader would see")
    return lines


def difference_lines(report: dict[str, Any]) -> list[str]:
    """Describe the differences between two dumps."""
    compared, differ = report["rows_compared"], report["rows_that_differ"]
    lines = [f"{compared} rows compared, {differ} differ"]
    if report["rows"][0] != report["rows"][1]:
        lines.append("final rows: {} and {}".format(*report["rows"]))
    if report["first"] is not None:
        first = report["first"]
        lines.append(
            f"{report['values_that_differ']} values differ, at most by "
            f"{report['largest_difference']:.6g}; first at slot {first['slot']}, channel "
            f"{first['channel']}: {first['values'][0]} and {first['values'][1]}"
        )
    elif report["equal"]:
        lines.append("equal")
    return lines


def conversion_lines(report: dict[str, Any]) -> list[str]:
    """Describe the written file and the values that the conversion changed."""
    head = (
        f"{report['output']}: {report['rows']} rows, {report['from']} to {report['to']}, "
        f"{report['bytes']} bytes"
    )
    if not report["changed"]:
        return [head, "every value reads back as it was"]
    share = report["changed"] / report["values"]
    largest = report["largest"]
    return [head, f"{share:.2%} of the values were rounded, at most by {largest:.6g}"]


def row_lines(dump: Dump, slot: int) -> list[str]:
    """Format the values of one slot, eight to a line.

    Raises:
        ValueError: the slot is beyond the cache.
    """
    slots = dump.cache.shape[0] * dump.cache.shape[1]
    if slot >= slots:
        raise ValueError(f"--row {slot}: the cache has {slots} slots")
    values = dump.read(slot, 1)[0].tolist()
    lines = [f"slot {slot}: page {slot // dump.cache.shape[1]}, entry {slot % dump.cache.shape[1]}"]
    for start in range(0, len(values), 8):
        some = "".join(f"{value:12.5g}" for value in values[start : start + 8])
        lines.append(f"{start:5}{some}")
    return lines
