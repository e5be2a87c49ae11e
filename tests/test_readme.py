"""The README is short and of today: lists are made from the tree, rows are recorded."""

import json
import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LISTS = runpy.run_path(str(ROOT / "docs" / "lists.py"))
ROW = re.compile(
    r"^\| (.+) \| ([\d.]+) \| (.+) \| ([\d.]+) \| (\d+) \| \[\w+\]\((.+?)(?:#.*)?\) \|$", re.M
)


def test_it_is_short() -> None:
    assert len(README.split()) <= 1000


def test_its_parts_are_in_order() -> None:
    parts = [
        "# anymla", "It has run on ", "headline.svg", "pip install", "flash_mla_sparse_fwd",
        "import LLM", "vllm serve", "from anymla.compat import deep_gemm", "families: begin",
        "## How fast", "make demo", "make test", "## Read on",
    ]  # fmt: skip
    places = [README.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("path", LISTS["LISTS"], ids=lambda path: path.name)
def test_lists_are_todays(path) -> None:
    """``make tables`` writes them."""
    key, lines = LISTS["LISTS"][path]
    _, inside, _ = LISTS["between"](path.read_text(encoding="utf-8"), key)
    assert inside.split("\n") == lines()


def test_a_page_needs_the_marks_of_its_list() -> None:
    with pytest.raises(ValueError, match="there is no <!-- rooms: begin --> with <!-- rooms: end"):
        LISTS["between"]("<!-- rooms: begin -->\nno end", "rooms")


def test_every_room_says_what_it_holds() -> None:
    for line in LISTS["rooms"]()[2:]:
        name, holds = re.fullmatch(r"\| `(\S+)/` \| (.+) \|", line).groups()
        assert len(holds.split()) >= 3, name


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")))


def test_its_rows_of_speed_are_in_the_tables_of_their_pages() -> None:
    """A time stands in one line of the page's table with its factor, and was measured that day."""
    rows = ROW.findall(README)
    assert len(rows) == 6
    measured = [
        (row["date"], value)
        for file in (ROOT / "benchmarks" / "results").glob("*_h200.jsonl")
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        for value in row.values()
        if isinstance(value, float) and str(row.get("device", "")).startswith("NVIDIA H200")
    ]
    layers = (ROOT / "benchmarks" / "results" / "layer.jsonl").read_text(encoding="utf-8")
    measured += [
        (row["date"], row["us"])
        for row in map(json.loads, layers.splitlines())
        if row.get("device") == "NVIDIA H200" and "us" in row
    ]
    for what, us, _, times, day, page in rows:
        table = (ROOT / page).read_text(encoding="utf-8")
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert any({us, times} <= numbers(line) for line in lines), what
        digits = len(us.partition(".")[2])
        same = [date for date, value in measured if f"{value:.{digits}f}" == us]
        assert any(date.startswith(f"2026-11-{day}") for date in same), what
