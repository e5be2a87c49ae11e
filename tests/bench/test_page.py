import json
import pathlib
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from anymla.bench.page.calculated import cache_by_context
from anymla.bench.page.documents import readme_blocks, with_blocks
from anymla.bench.page.figure import Bars, Figure, Point, Series, Stacks, axis, short
from anymla.bench.page.figures import figures
from anymla.bench.page.html import page
from anymla.bench.page.reading import batch_of, latest, own_us, peer_us, series_of
from anymla.bench.page.rows import case_of, load_rows, source
from anymla.bench.page.svg import NARROW, svg
from anymla.bench.page.tables import tables
from anymla.cli.main import main

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    document
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if re.search("<!-- (?!cases|mutations)\\w+: begin -->", document.read_text(encoding="utf-8"))
]
FACTS = {
    "device": "NVIDIA H200",
    "date": "2026-11-21T16:00Z",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "abc",
    "command": "anymla bench gpu",
}
PEERS = [
    {"part": "decode", "case": "8 tokens, 64 heads", "us": 20.0, "flash_mla_us": 30.0, **FACTS},
    {"part": "decode", "case": "128 tokens, 64 heads", "us": 50.0, "flash_mla_us": 40.0, **FACTS},
    {
        "part": "indexer",
        "case": "32 x 8192 keys",
        "triton_us": 24.0,
        "gluon_sm90_us": 20.0,
        "deep_gemm_us": 13.0,
        "vllm_us": 28.0,
        **FACTS,
    },
]


class Page(HTMLParser):
    """Balanced tags, and what the page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "polyline", "path"):
            self.open.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "srcset", "data")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_recorded_rows_make_a_page_that_loads_nothing(tmp_path) -> None:
    output = tmp_path / "report.html"
    result = CliRunner().invoke(
        main, ["bench", "report", "--results", str(RESULTS), "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    text = output.read_text()
    parsed = Page(text)
    assert (parsed.open, parsed.loads) == ([], [])
    for word in ("http:", "https:", "@import", "url(", "<script", "<link"):
        assert word not in text
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 640px" in text
    shown = " ".join(parsed.text)
    for title in ("How close to the roof", "What falls short", "What was run, and what was built"):
        assert title in shown
    assert "anymla bench gpu" in shown
    assert "NVIDIA H200; 2026-11-21" in shown


def test_the_cache_of_the_published_models() -> None:
    figure = cache_by_context("today")
    found = {series.name: {p.x: p.y for p in series.points} for series in figure.series}
    assert set(found) == {
        "V4-Flash, FP8 rows",
        "V4-Flash, bfloat16 rows",
        "V4-Pro, FP8 rows",
        "V4-Pro, bfloat16 rows",
    }
    # By hand at 2^20 tokens: 21 layers of ratio 4 and 20 of ratio 128 of Flash, pages of 256
    # tokens of 37440, 8640 (keys) and 1728 bytes; the rest is small.
    entries = 2**20 // 256 * (21 * (37440 + 8640) + 20 * 1728) / 1e6
    assert entries < found["V4-Flash, FP8 rows"][2**20] < 1.01 * entries
    assert found["V4-Pro, FP8 rows"][2**20] > found["V4-Flash, FP8 rows"][2**20]


def test_every_recorded_miss_is_on_it() -> None:
    rows = load_rows(RESULTS)
    missed = [row for row in latest(rows) if row.get("met") is False]
    table = next(each for each in tables(rows, RESULTS) if each.key == "missed")
    assert len(table.body) == len(missed) > 0


def test_every_row_says_what_made_it() -> None:
    for row in load_rows(RESULTS):
        if row["file"] != "build_matrix.jsonl":  # whose rows have digests of what they built
            missing = {"date", "commit", "command", "device", "torch"} - {k for k in row if row[k]}
            assert not missing, (row["file"], case_of(row), missing)


def test_every_figure_says_where_it_comes_from() -> None:
    made = figures(load_rows(RESULTS))
    assert {each.key for each in made} >= {"roofline", "bandwidth", "decode", "context", "memory"}
    for each in made:
        for word in ("2026-", "torch ", "commit ", "`anymla bench"):
            assert word in each.source, each.key


def test_nothing_recorded_is_said() -> None:
    assert "There are no result rows to show." in page([], [], "today")
    assert figures([]) == []


def test_text_of_rows_cannot_become_markup() -> None:
    rows = [{**PEERS[0], "case": "<script>8 tokens"}, {**PEERS[1], "case": "<script>9 tokens"}]
    assert "<script" not in page(figures(rows), tables(rows, RESULTS), "`<b>`")


def test_a_shape_that_loses_is_below_the_line_and_marked() -> None:
    drawn = [each for each in figures(PEERS) if each.key.startswith("peers-")]
    assert {each.key: each.title for each in drawn} == {
        "peers-decode": "Times as fast as FlashMLA: decode",
        "peers-indexer": "Times as fast as DeepGEMM + vLLM top-k: indexer",
    }
    points = {
        (series.name, point.x): point.y
        for figure in drawn
        for series in figure.series
        if not series.limit
        for point in series.points
    }
    assert points == {
        ("64 heads", 8.0): 1.5,
        ("64 heads", 128.0): 0.8,
        ("8192 keys", 32.0): 1.4,  # against the faster of our two backends
    }
    made = {each.title: each for each in tables(PEERS, RESULTS)}
    assert ["128 tokens, 64 heads", "!0.80 slower", "50", "40"] in made["Against FlashMLA"].body
    assert made["Against DeepGEMM, scores only"].body == [["32 x 8192 keys", "-", "20", "13"]]


def test_without_peer_rows_there_is_no_such_figure() -> None:
    rows = [{key: row[key] for key in row if "mla" not in key} for row in PEERS[:2]]
    assert not any(each.key.startswith("peers") for each in figures(rows))
    assert [own_us(row) for row in rows] == [20.0, 50.0]
    assert peer_us(rows[0]) == {}


def test_the_newest_row_counts() -> None:
    old = {**PEERS[0], "us": 99.0, "date": "2026-11-20T00:00Z"}
    assert latest([PEERS[0], old]) == [PEERS[0]]
    assert latest([old, PEERS[0]]) == [PEERS[0]]


@pytest.mark.parametrize(
    ("row", "batch"),
    [
        ({"case": "rope, 4096 tokens"}, 4096),
        ({"case": "paged_mqa_logits, 32 x 8192 keys"}, 32),
        ({"label": "C4, 4,096 queries"}, 4096),
        ({"case": "copy"}, None),
        ({"case": "x", "tokens": 7}, 7),
        ({"case": "decode 32 x 2 x 8192"}, 32),
        ({"case": "flash, ratio 4, batch 8, context 65536"}, 8),
        ({"label": "h64 b8 s_q2 128+512", "batch": 8, "rows": 2}, 8),
        ({"label": "all h64 T=4096 of 8192", "kind": "all", "context": 8192, "tokens": 4096}, 8192),
    ],
)
def test_batches(row, batch) -> None:
    assert batch_of(row) == batch


@pytest.mark.parametrize(
    ("row", "series"),
    [
        ({"case": "rope, 4096 tokens"}, "rope"),
        ({"case": "decode 32 x 2 x 8192"}, "decode 2 x 8192"),
        ({"case": "flash, ratio 4, batch 8, context 65536"}, "flash, ratio 4, context 65536"),
        ({"label": "h64 b8 s_q2 128+512", "batch": 8}, "h64 s_q2 128+512"),
        (
            {"label": "selected top 512 h64 T=4096 of 8192", "kind": "selected"},
            "selected top 512 h64",
        ),
    ],
)
def test_rows_of_a_series_have_the_same_name(row, series) -> None:
    assert series_of(row) == series


def test_indexer_and_layer_figures() -> None:
    rows = [
        {"part": "indexer", "case": f"decode 8 x 1 x {keys}", "triton_us": us, **FACTS}
        for keys, us in ((8192, 20.0), (262144, 90.0))
    ]
    rows += [
        {
            "part": "layer",
            "case": f"flash, ratio 4, batch {batch}, context 65536",
            "us": 100.0 + batch,
            "roofline_us": 80.0,
            **FACTS,
        }
        for batch in (1, 8)
    ]
    made = {each.key: each for each in figures(rows)}
    assert "layer-parts" not in made
    assert [(p.x, p.y) for p in made["indexer"].series[0].points] == [(8192, 20), (262144, 90)]
    assert made["layer"].series[0].name == "flash, ratio 4, context 65536"
    assert [(p.x, p.y) for p in made["layer"].series[0].points] == [(1, 101), (8, 108)]


def test_where_a_layers_time_goes() -> None:
    common = {"part": "decode layer", "us": 110.0, "roofline_us": 55.0, "launches": 40, **FACTS}
    rows = [
        {
            **common,
            "case": f"flash, ratio {ratio}, batch {batch}, context {context}",
            "parts_us": {"moe": 60.0, "norm_rope": 10.0, "linear": 30.0},
            **more,
        }
        for ratio, batch, context, more in (
            (4, 8, 65536, {"others_us": 99.0, "times_others": 0.9}),
            (4, 1, 65536, {}),
            (4, 1, 4096, {}),
            (4, 2, 65536, {"side_stream": True}),
            (0, 1, 4096, {}),
        )
    ]
    drawn = {each.key: each for each in figures(rows)}["layer-parts"]
    names = [stack.name for stack in drawn.stacks]
    assert names == [f"Flash, ratio {r}, batch {b}" for r, b in ((4, 1), (4, 8), (0, 1))]
    assert drawn.stacks[0].parts[:2] == (60, 30)
    assert drawn.stacks[0].parts[-1] == 10
    lines = readme_blocks(rows, RESULTS)["layer"]
    assert len(lines) == 2 + 4 + 2
    assert any("**0.90 slower**" in line and "| 8 |" in line for line in lines)
    assert 'class="bar stack"' in page([drawn], [], "")


def test_sources_say_each_thing_once() -> None:
    assert source(PEERS) == (
        "NVIDIA H200; 2026-11-21; torch 2.11.0, triton 3.6.0; commit abc; `anymla bench gpu`"
    )


@pytest.mark.parametrize(
    ("values", "log", "ends", "ticks"),
    [
        ((1024, 65536), True, (1024, 65536), [2.0**i for i in range(10, 17)]),
        ((9.7, 2400), True, (5, 5000), [10, 100, 1000]),
        ((3, 70), True, (2, 100), [2, 5, 10, 20, 50, 100]),
        ((5, 5), True, (2.5, 10), [5, 10]),
        ((9.8, 25), False, (0, 25), [0, 5, 10, 15, 20, 25]),
        ((0, 0), False, (0, 0), [0]),
    ],
)
def test_axes_are_round_and_hold_their_values(values, log, ends, ticks) -> None:
    made = axis(values, log=log, from_zero=True, most=8)
    assert (made.low, made.high) == pytest.approx(ends)
    assert list(made.ticks) == pytest.approx(ticks)
    for value in values:
        assert 0 <= made.place(value) <= 1


def test_numbers_of_ticks() -> None:
    assert [short(value) for value in (0.25, 5, 1000, 4096, 65536, 1048576, 3e6)] == [
        "0.25", "5", "1,000", "4k", "64k", "1M", "3M",
    ]  # fmt: skip


def test_points_lie_where_their_numbers_say() -> None:
    points = (Point(1, 0, "first"), Point(10, 50, "middle"), Point(100, 100, "last"))
    figure = Figure("k", "t", "x", "y", (Series("s", points),), "", log_y=False)
    circles = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg(figure, NARROW, "narrow"))
    (x0, y0), (x1, y1), (x2, y2) = [(float(x), float(y)) for x, y in circles]
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert (x0, y0) == (NARROW.left, NARROW.height - NARROW.bottom)
    assert (x2, y2) == (NARROW.width - NARROW.right, NARROW.top)


def test_plots(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="PNG plots need the extra report")
    from anymla.bench.page.png import write_png

    made = figures([*load_rows(RESULTS)])
    for figure in (next(f for f in made if isinstance(f, kind)) for kind in (Figure, Bars, Stacks)):
        write_png(figure, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_tables_of_a_document_are_renewed_between_their_marks() -> None:
    text = "a\n<!-- decode: begin -->\nold\n<!-- decode: end -->\nb\n<!-- other: begin -->\n"
    rows = load_rows(RESULTS)
    new = with_blocks(text, readme_blocks(rows, RESULTS))
    assert new.startswith("a\n<!-- decode: begin -->\n| heads | 1 request | 8 |")
    assert "old" not in new
    assert new.endswith("<!-- decode: end -->\nb\n<!-- other: begin -->\n")
    assert with_blocks(new, readme_blocks(rows, RESULTS)) == new


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_tables_are_those_of_the_rows(document) -> None:
    """If not: make tables."""
    text = document.read_text(encoding="utf-8")
    assert with_blocks(text, readme_blocks(load_rows(RESULTS), RESULTS)) == text


@pytest.mark.parametrize("line", ["{", "[1]", "7"])
def test_a_broken_row_is_named(tmp_path, line) -> None:
    (tmp_path / "gpu.jsonl").write_text(json.dumps(PEERS[0]) + "\n" + line + "\n")
    words = ["bench", "report", "--results", str(tmp_path), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "gpu.jsonl:2: " in result.output
    assert not (tmp_path / "out").exists()


def test_conformance_says_who_was_judged_where() -> None:
    def judged(
        subject: str, case_id: str, status: str, date: str, **facts: str
    ) -> dict[str, object]:
        row = {"part": "conformance", "subject": subject, "case_id": case_id, "story": "holds"}
        return {**row, "status": status, "detail": "lost", "date": date, "version": "1", **facts}

    rows = [
        judged("theirs", "A1", "failed", "2026-11-21T12:00Z", device="NVIDIA H200"),
        judged("theirs", "L6", "passed", "2026-11-21T11:00Z", device="NVIDIA H200"),
        judged("theirs", "L6", "failed", "2026-11-21T10:00Z", device="NVIDIA H200"),
        judged("torch", "A1", "not applicable", "2026-11-21T12:00Z", device="cpu", cpu="EPYC"),
    ]
    table = next(each for each in tables(rows, RESULTS) if each.key == "conformance")
    assert table.head == ["case", "what must hold", "torch (CPU)", "theirs (NVIDIA H200)"]
    assert table.body == [["L6", "holds", "", "ok"], ["A1", "holds", "-", "!fails"]]
    lines = readme_blocks(rows, RESULTS)["conformance"]
    assert "| A1 | holds | - | **fails** |" in lines
    assert lines[-1] == "- theirs (NVIDIA H200), A1: lost"


def test_what_the_doctor_said(tmp_path) -> None:
    file = tmp_path / "doctor.jsonl"
    words = ["doctor", "--device", "cpu", "--no-speed", "--family", "selection"]
    result = CliRunner().invoke(main, [*words, "--json", str(file)])
    assert result.exit_code == 0, result.output
    table = next(each for each in tables(load_rows(tmp_path), RESULTS) if "doctor" in each.key)
    assert table.body == [["selection: window rows", "right", "", "", "torch", "native"]]
    assert "`anymla doctor`" in table.source
