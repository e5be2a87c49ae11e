"""Tables of result rows, as lists of cells, and as Markdown for the README."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from anymla.bench.page.layers import layer_table
from anymla.bench.page.reading import latest, microseconds, own_us, peer_us
from anymla.bench.page.rows import Row, case_of, device_of, is_gpu, number_before, source
from anymla.bench.support_matrix import support_table

Cells = list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        key: short name, for links.
        title: what it says.
        head: names of the columns.
        body: rows; a cell that begins with "!" is something that fell short.
        source: device, date, versions, commit and command.
        note: what to know when reading it.
        folded: shown on request.
    """

    key: str
    title: str
    head: Cells
    body: list[Cells]
    source: str
    note: str = ""
    folded: bool = False


def tables(rows: Sequence[Row], results: Path) -> list[Table]:
    """Every table that the rows allow."""
    new = latest(rows)
    made = [*_by_peer(new), _missed(new), _whole_model(new)]
    made += [*_doctor(new), _conformance(rows)]
    made.append(_support(results))
    made += [_everything(new, device) for device in dict.fromkeys(map(device_of, new))]
    return [table for table in made if table is not None and table.body]


def _peers(rows: Sequence[Row]) -> Table:
    """Every shape beside every other library."""
    body, used = [], []
    for row in rows:
        mine, others = own_us(row), peer_us(row)
        if mine is None or not others:
            continue
        used.append(row)
        for name, theirs in others.items():
            ratio = theirs / mine
            shown = f"{ratio:.2f}" if ratio >= 1 else f"!{ratio:.2f} slower"
            if "scores only" in name:
                shown = "-"
            body.append([case_of(row), name, shown, microseconds(mine), microseconds(theirs)])
    head = ["case", "other", "times", "us", "its us"]
    note = "times: how many times as fast as the other. Below 1 the other is faster."
    return Table("against", "Against other libraries", head, body, source(used), note)


def _by_peer(rows: Sequence[Row]) -> list[Table]:
    """A table for each other library, narrow enough for a phone."""
    made = []
    for name in dict.fromkeys(name for row in rows for name in peer_us(row)):
        table = _peers([row for row in rows if name in peer_us(row)])
        body = [[case, *rest] for case, other, *rest in table.body if other == name]
        key, head = f"against-{_slug(name)}", [word for word in table.head if word != "other"]
        made.append(
            dataclasses.replace(
                table, key=key, title=f"Against {name}", head=head, body=body, folded=len(body) > 16
            )
        )
    return made


def _missed(rows: Sequence[Row]) -> Table:
    missed = [row for row in rows if row.get("met") is False]
    body = [[case_of(row), f"!{_reached(row)}", _asked(row), device_of(row)] for row in missed]
    head = ["case", "measured", "asked", "device"]
    note = "Every row with a target that was not met."
    return Table("missed", "What falls short", head, body, source(missed), note)


def _reached(row: Row) -> str:
    if isinstance(row.get("error"), str):
        return str(row["error"])
    target = str(row.get("target", ""))
    if "share_of_copy" in target:
        return f"{row['share_of_copy']:g} of copy"
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
            case_of(row),
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
            us = "" if each["us"] is None else f"{each['us']:g}"
            share = "" if each["share"] is None else f"{each['share']:.0%} of a {each['bound']}"
            what = f"{each['family']}: {each['label']}"
            body.append([what, each["backend"] or "-", each["how"], right, us, share])
        head = ["what", "backend", "how", "result", "us", "of this machine's ceiling"]
        title = f"anymla doctor on {row['device']}"
        note = "Warm, unlike the timings above."
        words = ("torch", "triton", "commit")
        versions = ", ".join(f"{word} {row[word]}" for word in words if row.get(word))
        origin = f"{row['device']}; {str(row['date'])[:10]}; {versions}; `anymla doctor`"
        made.append(Table(f"doctor-{_slug(str(row['device']))}", title, head, body, origin, note))
    return made


def _judged(row: Row) -> str:
    """What was judged, and where."""
    return f"{row['subject']} ({device_of(row) if is_gpu(row) else 'CPU'})"


def _verdicts(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """The newest row by what was judged and by case."""
    judged = sorted(
        (row for row in rows if row.get("part") == "conformance"),
        key=lambda row: str(row.get("date", "")),
    )
    return {(_judged(row), str(row["case_id"])): row for row in judged}


def _conformance(rows: Sequence[Row]) -> Table:
    newest = _verdicts(rows)
    subjects = sorted({subject for subject, _ in newest}, key=lambda name: (_order(name), name))
    stories: dict[str, str] = {}
    words: dict[str, dict[str, str]] = defaultdict(dict)
    marks = {"passed": "ok", "failed": "!fails", "not applicable": "-"}
    for (subject, case_id), row in newest.items():
        stories[case_id] = str(row["story"])
        words[case_id][subject] = marks.get(str(row["status"]), "?")
    body = [
        [case_id, stories[case_id], *(words[case_id].get(subject, "") for subject in subjects)]
        for case_id in sorted(stories, key=lambda name: ("LQRCIAM".find(name[0]), int(name[1:])))
    ]
    head = ["case", "what must hold", *subjects]
    versions = {_judged(r): str(r["version"]) for r in newest.values() if r.get("version")}
    note = "An empty cell: not run. " + "; ".join(f"{n}: {v}" for n, v in versions.items())
    origin = source(list(newest.values()))
    return Table("conformance", "Conformance: who keeps what", head, body, origin, note)


def _order(subject: str) -> int:
    """This package's backends before other libraries."""
    return 0 if subject.split(" ")[0] in ("torch", "triton", "gluon_sm90", "reference") else 1


def _support(results: Path) -> Table:
    lines = support_table(results)
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
        body.append([case_of(row), microseconds(own_us(row) or 0.0), rate, work, asked])
    head = ["case", "us", "GB/s", "TFLOP/s", "asked"]
    title = f"Every timing on {device}"
    return Table(f"all-{_slug(device)}", title, head, body, source(chosen), folded=True)


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def readme_blocks(rows: Sequence[Row], results: Path) -> dict[str, list[str]]:
    """Lines between ``<!-- name: begin -->`` and ``<!-- name: end -->``, by name."""
    new = latest(rows)
    blocks = {"support": support_table(results)}
    decode = [row for row in new if is_gpu(row) and row.get("part") == "attention"]
    decode = [
        row for row in decode if "128 + 512 slots" in case_of(row) and "invar" not in case_of(row)
    ]
    if decode:
        blocks["decode"] = [*_by_heads(decode), "", f"({source(decode)})"]
    if layers := layer_table(new):
        blocks["layer"] = layers
    judged = _conformance(rows)
    if judged.body:
        blocks["conformance"] = [
            *markdown(judged),
            "",
            f"{judged.note} ({judged.source})",
            "",
            *_failures(rows),
        ]
    compared = _peers(new)
    if compared.body:
        blocks["peers"] = [*markdown(compared), "", f"({compared.source})"]
    return blocks


def _failures(rows: Sequence[Row]) -> list[str]:
    """What each failing case said."""
    return [
        f"- {subject}, {case_id}: {str(row['detail'])[:300]}"
        for (subject, case_id), row in _verdicts(rows).items()
        if row["status"] == "failed"
    ]


def _by_heads(rows: Sequence[Row]) -> list[str]:
    found: dict[float, dict[float, str]] = defaultdict(dict)
    for row in rows:
        heads, tokens = number_before("heads", case_of(row)), number_before("tokens", case_of(row))
        if heads is not None and tokens is not None and tokens <= 256 and "us" in row:
            found[heads][tokens] = f"{row['us']:.1f}"
    batches = sorted({tokens for times in found.values() for tokens in times})
    lines = ["| heads | " + " | ".join(f"{batch:g} tokens" for batch in batches) + " |"]
    lines.append("|--:" * (len(batches) + 1) + "|")
    for heads in sorted(found, reverse=True):
        cells = [found[heads].get(batch, "-") for batch in batches]
        lines.append(f"| {heads:g} | " + " | ".join(cells) + " |")
    return lines


def markdown(table: Table) -> list[str]:
    """A table as Markdown; what fell short is bold."""
    lines = ["| " + " | ".join(table.head) + " |", "|---" * len(table.head) + "|"]
    for cells in table.body:
        shown = [f"**{cell[1:]}**" if cell.startswith("!") else cell for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def with_blocks(text: str, blocks: dict[str, list[str]]) -> str:
    """The text with what lies between known marks replaced; marks that it lacks are left out."""
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text and end in text:
            before, rest = text.split(begin, 1)
            _, after = rest.split(end, 1)
            text = "\n".join([before + begin, *lines, end + after])
    return text
