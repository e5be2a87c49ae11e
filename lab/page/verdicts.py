"""Table of recorded conformance verdicts by case and subject, and the failures' details."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lab.page.rows import Row, device_of, is_gpu, of_part, source
from lab.page.table import Table


def _judged(row: Row) -> str:
    """Return the judged subject and its device: "CPU" or the GPU's name."""
    return f"{row['subject']} ({device_of(row) if is_gpu(row) else 'CPU'})"


def _verdicts(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Return conformance rows by judged subject and case id."""
    judged = of_part(rows, "conformance")
    return {(_judged(row), str(row["case_id"])): row for row in judged}


def conformance(rows: Sequence[Row]) -> Table:
    """Tabulate the verdicts: cases down, judged subjects across."""
    newest = _verdicts(rows)
    subjects = sorted({subject for subject, _ in newest}, key=lambda name: (_order(name), name))
    stories: dict[str, str] = {}
    words: dict[str, dict[str, str]] = defaultdict(dict)
    marks = {"passed": "ok", "failed": "!fails", "not applicable": "-"}
    # A case's story is that of its newest row, so rows come in the order of their dates.
    for (subject, case_id), row in sorted(newest.items(), key=lambda item: str(item[1]["date"])):
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
    return Table(head, body, origin, note)


def _order(subject: str) -> int:
    """Return 0 for this package's backends and 1 for other libraries, for sorting."""
    own = ("best", "torch", "triton", "gluon_sm90", "vendor", "reference", "anymla.compat")
    return 0 if subject.split(" ")[0].rstrip(",") in own else 1


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown line for each failed case, with at most 300 letters of its detail."""
    return [
        f"- {subject}, {case_id}: {str(row['detail'])[:300]}"
        for (subject, case_id), row in _verdicts(rows).items()
        if row["status"] == "failed"
    ]
