"""Tables of result rows, as lists of cells."""

from __future__ import annotations

from collections.abc import Sequence

from lab.page.newest import things_of
from lab.page.peers import others_of, tables_by_peer
from lab.page.reading import microseconds, own_us
from lab.page.rows import Row, device_of, name_of, source
from lab.page.table import Table, slug
from lab.page.verdicts import conformance
from lab.support_matrix import support_table


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that the rows allow.

    Args:
        rows: those that count (``newest``).
    """
    measured = [row for row in rows if "module" not in row and "family" not in row]
    made = [missed(measured), *tables_by_peer(measured), _whole_model(measured)]
    made += [*_doctor(measured), conformance(measured), _support(rows)]
    made += [_everything(measured, device) for device in dict.fromkeys(map(device_of, measured))]
    return [table for table in made if table.body]


def missed(rows: Sequence[Row]) -> Table:
    """What was asked of a row and not reached, and where another library is faster."""
    short = [row for row in rows if row.get("met") is False]
    body = [[_named(row), f"!{_reached(row)}", _asked(row), device_of(row)] for row in short]
    for row in rows:
        mine, others = own_us(row), others_of(row)
        if mine and others and min(others.values()) < mine:
            peer = min(others, key=others.__getitem__)
            ratio = f"!{others[peer] / mine:.2f} times"
            body.append([_named(row), ratio, f"as fast as {peer}", device_of(row)])
            short.append(row)
    head = ["case", "measured", "asked", "device"]
    note = "Every target that was not met, then every shape in which another library is faster."
    return Table("missed", "What falls short", head, body, source(short), note)


def _named(row: Row) -> str:
    """A case that says what ran where its own words do not."""
    operation, shape, *_ = things_of(row)[0]
    if operation in ("cache", "layer", "attention"):
        return name_of(row)
    return f"{operation}: {name_of({'case': shape})}"


def _reached(row: Row) -> str:
    if isinstance(row.get("error"), str):
        return str(row["error"])
    target = str(row.get("target", ""))
    if "share_of_copy" in target:
        return f"{row['share_of_copy']:g} of copy"
    if target.endswith(" us"):
        return f"{own_us(row):.4g} us"
    for key, unit in (
        ("ratio", "times"),
        ("us", "us"),
        ("times_transformers", "x transformers"),
        ("excess", "over"),
    ):
        if key in row:
            return f"{row[key]:.4g} {unit}"
    return "-"


def _asked(row: Row) -> str:
    return str(row.get("target", "")).replace("share_of_copy >=", "at least")


def _whole_model(rows: Sequence[Row]) -> Table:
    chosen = [row for row in rows if "tokens_per_s" in row and "decode_ms" in row]
    body = [
        [
            name_of(row),
            f"{row['decode_ms']:.1f} ms",
            f"{row['tokens_per_s']:.0f}",
            f"{row['times_transformers']:.2f}" if "times_transformers" in row else "1",
        ]
        for row in chosen
    ]
    head = ["program", "a decode step", "tokens/s", "times transformers"]
    return Table("model", "A whole tiny model", head, body, source(chosen))


def _doctor(rows: Sequence[Row]) -> list[Table]:
    """What ``anymla doctor`` said, a table a device."""
    made = []
    for row in rows:
        if row.get("part") != "doctor":
            continue
        body = []
        for each in row["findings"]:
            right = "right" if each["right"] else "!wrong" if each["right"] is False else "-"
            us = f"{each['us']:g}" if each.get("us") is not None else ""
            share = f"{each['share']:.0%} of a {each['bound']}" if each.get("share") else ""
            what = f"{each['family']}: {each.get('label', each['operation'])}"
            body.append([what, right, us, share, each["backend"] or "-", each["how"]])
        head = ["what", "result", "us", "of the ceiling", "backend", "how"]
        title = f"anymla doctor on {row['device']}"
        note = "Warm, unlike the timings above."
        words = ("torch", "triton", "commit")
        versions = ", ".join(f"{word} {row[word]}" for word in words if row.get(word))
        origin = f"{row['device']}; {str(row['date'])[:10]}; {versions}; `anymla doctor`"
        made.append(Table(f"doctor-{slug(str(row['device']))}", title, head, body, origin, note))
    return made


def _support(rows: Sequence[Row]) -> Table:
    lines = support_table(rows)
    cells = [
        [cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines
    ]
    body = cells[2:]
    note = (
        "run: its tests passed on such a device. built n: that many kernels were compiled for it "
        "without one, and fit."
    )
    origin = "benchmarks/results/build_matrix.jsonl and gpu_tests.jsonl"
    return Table("support", "What was run, and what was built", cells[0], body, origin, note)


def _everything(rows: Sequence[Row], device: str) -> Table:
    chosen = [row for row in rows if device_of(row) == device and own_us(row) is not None]
    body = []
    for row in chosen:
        met = {"True": "met", "False": "!missed"}.get(str(row.get("met")), "")
        rate = f"{row['gb_per_s']:g}" if "gb_per_s" in row else ""
        work = f"{row['tflops']:g}" if row.get("tflops") is not None else ""
        asked = f"{met}: {row['target']}" if met else ""
        body.append([name_of(row), microseconds(own_us(row) or 0.0), rate, work, asked])
    head = ["case", "us", "GB/s", "TFLOP/s", "asked"]
    title = f"Every timing on {device}"
    return Table(f"all-{slug(device)}", title, head, body, source(chosen), folded=True)
