import itertools
import json
import pathlib
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from anymla.cli.main import main
from lab.page.calculated import cache_by_context
from lab.page.colours import LIGHT
from lab.page.decode import decode_blocks
from lab.page.documents import readme_blocks, with_blocks
from lab.page.draw import DASHES, HATCHES, MARKERS, NARROW, WIDE, svg, svg_file
from lab.page.figure import MOST_SERIES, Bars, Figure, Point, Ranges, Series, Stacks, short
from lab.page.figures import figures
from lab.page.headline import headline, sentences
from lab.page.newest import newest
from lab.page.page import FirstScreen, page
from lab.page.peers import decode_by_heads, peer_table
from lab.page.reading import batch_of, own_us, peer_us, series_of
from lab.page.rows import case_of, load_rows, name_of, source
from lab.page.tables import tables

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
    """Balanced tags, tables that scroll by themselves, and what the page loads and links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[list[tuple[str, str]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            assert ("class", "scroll") in self.attributes[-1]
        if tag not in ("meta", "br"):
            self.open.append(tag)
            self.attributes.append(attributes)
        self.loads += [value for name, value in attributes if name in ("src", "srcset", "data")]
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value[1:] for name, value in attributes if name == "href"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.attributes.pop()

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def rows():
    """The recorded rows that count."""
    return newest(load_rows(RESULTS))


@pytest.fixture(scope="module")
def plots(rows):
    """Everything that is drawn of them."""
    return [headline(rows), *figures(rows), cache_by_context("today")]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """The page that the command makes of them; once, for it takes seconds."""
    output = tmp_path_factory.mktemp("page") / "report.html"
    words = ["bench", "report", "--results", str(RESULTS), "--output", str(output)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return output.read_text(encoding="utf-8")


def drawing(text: str, key: str, css: str) -> ElementTree.Element:
    """A plot of the page."""
    found = re.search(rf'<section id="{key}">.*?(<svg[^>]*class="{css}".*?</svg>)', text, re.DOTALL)
    return ElementTree.fromstring(found[1])


def test_the_recorded_rows_make_a_page_that_loads_nothing(text) -> None:
    parsed = Page(text)
    assert (parsed.open, parsed.loads) == ([], [])
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert set(parsed.links) <= set(parsed.ids)
    for word in ("http:", "https:", "@import", "<script", "<link"):
        assert word not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 640px" in text
    shown = " ".join(parsed.text)
    for title in ("How close to the roof", "What falls short", "What was run, and what was built"):
        assert title in shown
    assert "anymla bench gpu" in shown
    assert "NVIDIA H200; 2026-11-2" in shown


def test_without_the_extra_the_page_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    words = ["bench", "report", "--results", str(RESULTS), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "pip install '.[report]'" in result.output
    assert not (tmp_path / "out").exists()


def test_tables_of_documents_need_no_plots(tmp_path, monkeypatch) -> None:
    for module in ("jinja2", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    document = tmp_path / "page.md"
    document.write_text("<!-- decode: begin -->\n<!-- decode: end -->\n")
    words = ["bench", "report", "--results", str(RESULTS), "--tables", str(document)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "| heads | 1 request | 8 |" in document.read_text()


def test_a_newer_row_of_the_same_thing_supersedes_the_older() -> None:
    """Whichever benchmark, backend, commit or versions made it."""
    old = {
        "part": "attention",
        "case": "sparse_attention, 32 tokens, 16 heads, 128 + 512 slots",
        "us": 23.34,
        "target": "<= 17.0 us",
        "met": False,
        **FACTS,
        "date": "2026-11-21T13:58Z",
        "commit": "old",
    }
    sizes = {"batch": 32, "rows": 1, "heads": 16, "extra": 512, "page": 64}
    new = {
        "part": "decode attention beside FlashMLA",
        "case": "h16 b32 s_q1 128+512",
        **sizes,
        "backend": "gluon_sm90",
        "microseconds": 13.6,
        "flash_mla_microseconds": 26.0,
        **FACTS,
        "date": "2026-11-22T05:52Z",
    }
    xpu = {
        "part": "portable decode attention beside vLLM's",
        "case": "h16 b32 s_q1 128+512",
        **sizes,
        "us": 20.0,
        "xpu_us": 90.0,
        **FACTS,
        "date": "2026-11-21T19:50Z",
    }
    kept = newest([old, xpu, new])
    assert [row["case"] for row in kept] == ["h16 b32 s_q1 128+512"] * 2
    assert kept[0] == xpu  # nobody else was compared with that peer
    # What was asked of the old row is asked of the one that took its place.
    assert kept[1] == {**new, "target": "<= 17.0 us", "met": True}
    assert newest([new, xpu, old]) == [kept[1], xpu]
    slow = {**new, "microseconds": 18.7}
    assert newest([old, slow]) == [{**slow, "target": "<= 17.0 us", "met": False}]
    # Another device, shape or option is another thing.
    for other in (
        {**old, "device": "NVIDIA B200"},
        {**old, "case": old["case"].replace("32 tokens", "64 tokens")},
        {**old, "case": old["case"] + ", batch invariant"},
    ):
        assert newest([other, new]) == [other, new]
    for other in ({"rows": 2}, {"page": 2}, {"ragged": True}, {"extra": 1024}):
        assert newest([old, {**new, **other}]) == [old, {**new, **other}]


def test_selection_supersedes_its_two_halves() -> None:
    halves = [
        {"part": "indexer", "case": f"paged_mqa_logits{both}, 32 x 8192 keys", "us": 47.0, **FACTS}
        for both in ("", " and topk_per_row 512")
    ]
    row = {
        "part": "indexer",
        "case": "decode 32 x 1 x 8192",
        "topk_us": 75.0,
        "gluon_sm90_us": 17.0,
        "gluon_sm90_scores_us": 14.0,
        **FACTS,
        "date": "2026-11-22T02:38Z",
    }
    assert newest([*halves, row]) == [row]
    # A prefill's queries share their keys: not the same thing as paged ones.
    prefill = {**row, "case": "prefill 32 x 8192"}
    assert newest([*halves, prefill]) == [*halves, prefill]
    del row["gluon_sm90_scores_us"]
    assert newest([*halves, row]) == [halves[0], row]


def test_of_two_rows_of_one_date_the_later_counts() -> None:
    first, second = {**PEERS[0], "us": 1.0}, {**PEERS[0], "us": 2.0}
    assert newest([first, second]) == [second]


def test_what_falls_short_agrees_with_the_readme(rows) -> None:
    """Both are of the same rows: no shape of the README's table is another on the page."""
    table = decode_by_heads(rows)
    body, seen = {cells[0]: cells[1:] for cells in table.body}, 0
    short_of = next(each for each in tables(rows) if each.key == "missed")
    for case, measured, *_ in short_of.body:
        if found := re.match(r"decode attention: (\d+) x 1 queries, (\d+) heads", case):
            at = table.head.index("1 request" if found[1] == "1" else found[1]) - 1
            microseconds, times = body[found[2]][at].split()
            value, unit = measured[1:].split()
            told = {"us": f"{float(value):.1f}", "times": f"({float(value):.2f})"}[unit]
            assert told == {"us": microseconds, "times": times}[unit]
            seen += 1
    assert seen == 3
    assert not any("sparse_attention, 8 tokens" in cells[0] for cells in short_of.body)


def test_series_are_few_named_and_told_apart_without_colour(plots, text) -> None:
    assert len(set(MARKERS)) == len(set(map(str, DASHES))) == len(set(HATCHES)) == MOST_SERIES
    for plot in plots:
        root = drawing(text, plot.key, "narrow")
        words = " ".join("".join(each.itertext()) for each in root.iter("text"))
        names = []
        if isinstance(plot, Figure):
            drawn = [series for series in plot.series if not series.limit]
            assert 1 <= len(drawn) <= MOST_SERIES, plot.key
            # scattered points have a legend, in which the roof needs no name
            names = [series.name for series in (plot.series if drawn[0].joined else drawn)]
        elif isinstance(plot, Stacks):
            assert len(plot.parts) <= MOST_SERIES
            names = list(plot.parts)
        elif isinstance(plot, Ranges):
            names = [each.name for each in plot.ranges]
        for name in names:
            assert name in words, (plot.key, name)


def test_lines_and_markers_differ(text) -> None:
    """In the drawing itself: no two lines have the same dashes, no two the same marker."""
    root = drawing(text, "layer", "wide")
    groups = [g for g in root.iter("g") if g.find("g/use/title") is not None]
    assert len(groups) == MOST_SERIES
    dashes = [re.findall(r"stroke-dasharray: ([^;]+)", g.find("path").get("style")) for g in groups]
    markers = [g.find("defs/path").get("d") for g in groups]
    assert len({str(dash) for dash in dashes}) == len(set(markers)) == MOST_SERIES


def test_labels_of_lines_do_not_cover_each_other() -> None:
    lines = tuple(
        Series(f"line {i}", (Point(1, 5, ""), Point(2, 5 + i / 100, ""))) for i in range(6)
    )
    figure = Figure("k", "t", "x", "", "", "y", lines, log_x=False, log_y=False)
    root = ElementTree.fromstring(svg(figure, WIDE))
    heights = {
        "".join(text.itertext()): float(text.get("y"))
        for text in root.iter("text")
        if "".join(text.itertext()).startswith("line")
    }
    ordered = [heights[f"line {i}"] for i in range(6)]
    gaps = [above - below for above, below in itertools.pairwise(ordered)]
    assert min(gaps) > 11, gaps


def test_more_series_than_can_be_told_apart_are_refused() -> None:
    lines = tuple(Series(f"{i}", (Point(1, 1, ""),)) for i in range(MOST_SERIES + 1))
    with pytest.raises(AssertionError, match="7 series"):
        Figure("k", "t", "x", "", "", "y", lines)


def test_flash_is_never_said_alone(text) -> None:
    """Beside FlashMLA it would be read as that: the model is V4-Flash."""
    assert name_of({"case": "flash, ratio 4, batch 8"}) == "V4-Flash, ratio 4, batch 8"
    assert name_of({"case": "pro wq_b 1 x 1"}) == "V4-Pro wq_b 1 x 1"
    shown = re.sub(
        r"<style>.*?</style>|<details class=\"source\">.*?</details>", "", text, flags=re.S
    )
    assert not re.findall(r"(?<!V4-)\bFlash\b|\bflash\b[^_]", re.sub(r"<[^>]+>", "", shown))


def test_the_first_screen_is_three_sentences_a_chart_and_a_table(rows) -> None:
    told = sentences(rows)
    assert len(told) == 3
    assert all(sentence.endswith(".") for sentence in told)
    missed = [row for row in rows if row.get("met") is False]
    assert f"{len(missed)} of " in told[2]
    text = page(FirstScreen(told, headline(rows), decode_by_heads(rows)), [], [], "")
    assert text.index("</h1>") < text.index("<svg") < text.index("<table") < text.index("<nav")


def test_the_headline_is_the_mean_and_the_ends_of_all_shapes() -> None:
    rows = [
        {
            "part": "decode attention beside FlashMLA",
            "case": f"h64 b{batch}",
            "rows": 1,
            "microseconds": 10.0,
            "flash_mla_microseconds": theirs,
            **FACTS,
        }
        for batch, theirs in ((1, 40.0), (8, 10.0), (32, 5.0))
    ]
    (each,) = headline(rows).ranges
    assert (each.low, each.high) == (0.5, 4.0)
    assert each.middle == pytest.approx(2 ** (1 / 3))
    assert each.text == "1.26 × FlashMLA"
    told = " ".join(sentences(rows))
    assert "faster in 2 of 3 shapes" in told
    assert "1 shapes lose, the slowest at 0.50" in told


def test_the_cache_of_the_published_models() -> None:
    figure = cache_by_context("today")
    found = {series.name: {p.x: p.y for p in series.points} for series in figure.series}
    assert set(found) == {
        "V4-Flash, FP8",
        "V4-Flash, bfloat16",
        "V4-Pro, FP8",
        "V4-Pro, bfloat16",
    }
    # By hand at 2^20 tokens: 21 layers of ratio 4 and 20 of ratio 128 of Flash, pages of 256
    # tokens of 37440, 8640 (keys) and 1728 bytes; the rest is small.
    entries = 2**20 // 256 * (21 * (37440 + 8640) + 20 * 1728) / 1e6
    assert entries < found["V4-Flash, FP8"][2**20] < 1.01 * entries
    assert found["V4-Pro, FP8"][2**20] > found["V4-Flash, FP8"][2**20]


def least_ratio(row) -> float:
    """Time of the fastest library that does all of a row's work, over ours."""
    names = (
        "flash_mla_us", "flash_mla_microseconds", "peer_us", "topk_us", "vllm_us", "xpu_us",
        "marlin_us", "triton_kernels_us", "humming_us", "humming_token_us",
    )  # fmt: skip
    others = [row[name] for name in names if name in row]
    if row.get("part") == "decode layer" and "others_us" in row:
        others.append(row["others_us"])
    mine = own_us(row)
    return min(others) / mine if mine and others else 1.0


def test_every_recorded_miss_is_on_it(rows) -> None:
    missed = [row for row in rows if row.get("met") is False]
    lost = [ratio for row in rows if (ratio := least_ratio(row)) < 1]
    table = next(each for each in tables(rows) if each.key == "missed")
    assert len(table.body) == len(missed) + len(lost) > 0
    assert f"{len(lost)} shapes lose, the slowest at {min(lost):.2f}" in sentences(rows)[2]


def test_every_row_says_what_made_it() -> None:
    for row in load_rows(RESULTS):
        if row["file"] != "build_matrix.jsonl":  # whose rows have digests of what they built
            missing = {"date", "commit", "command", "device", "torch"} - {k for k in row if row[k]}
            assert not missing, (row["file"], case_of(row), missing)


def test_every_figure_says_where_it_comes_from(rows) -> None:
    made = figures(rows)
    assert {each.key for each in made} >= {"roofline", "bandwidth", "decode", "context", "memory"}
    for each in made:
        for word in ("2026-", "torch ", "commit ", "`anymla "):
            assert word in each.source, each.key


def test_nothing_recorded_is_said() -> None:
    assert "There are no result rows to show." in page(FirstScreen(), [], [], "today")
    assert (figures([]), headline([]), sentences([])) == ([], None, [])


def test_text_of_rows_cannot_become_markup() -> None:
    rows = [{**PEERS[0], "case": "<script>8 tokens"}, {**PEERS[1], "case": "<script>9 tokens"}]
    text = page(FirstScreen(["<script>"]), figures(rows), tables(rows), "`<b>`")
    assert "<script" not in text
    assert "<code>&lt;b&gt;</code>" in text


def test_a_shape_that_loses_is_below_the_line_and_marked() -> None:
    drawn = [each for each in figures(PEERS) if each.key.startswith("peers-")]
    assert {each.key: each.title for each in drawn} == {
        "peers-decode": "Decode, beside FlashMLA",
    }  # the indexer's one size is in the tables
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
    }
    made = {each.title: each for each in tables(PEERS)}
    assert made["Against DeepGEMM + vLLM top-k"].body == [["32 x 8192 keys", "1.40", "20", "28"]]
    assert ["128 tokens, 64 heads", "!0.80 slower", "50", "40"] in made["Against FlashMLA"].body
    assert made["Against DeepGEMM, scores only"].body == [["32 x 8192 keys", "-", "20", "13"]]


def test_without_peer_rows_there_is_no_such_figure() -> None:
    rows = [{key: row[key] for key in row if "mla" not in key} for row in PEERS[:2]]
    assert not any(each.key.startswith("peers") for each in figures(rows))
    assert [own_us(row) for row in rows] == [20.0, 50.0]
    assert peer_us(rows[0]) == {}


def test_a_comparison_names_a_device_that_is_not_the_usual_one() -> None:
    rows = [{**row, "device": "card A"} for row in PEERS[:2]] + [{**PEERS[0], "device": "card B"}]
    cases = [line[0] for line in peer_table(rows).body]
    assert [case.endswith(", card B") for case in cases] == [False, False, True]
    assert not any("card A" in case for case in cases)
    assert peer_table([]).body == []


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
        ({"case": "flash, ratio 4, batch 8, context 65536"}, "V4-Flash, ratio 4, context 65536"),
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
            "part": "decode layer",
            "case": f"flash, ratio 4, batch {batch}, context 65536",
            "us": 100.0 + batch,
            "roofline_us": 80.0,
            "parts_us": {},
            **FACTS,
        }
        for batch in (1, 8)
    ]
    made = {each.key: each for each in figures(rows)}
    assert [(p.x, p.y) for p in made["indexer"].series[0].points] == [(8192, 20), (262144, 90)]
    assert made["layer"].series[0].name == "V4-Flash, ratio 4"
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
            (0, 1, 4096, {}),
        )
    ]
    drawn = {each.key: each for each in figures(rows)}["layer-parts"]
    names = [stack.name for stack in drawn.stacks]
    assert names == [
        "V4-Flash, ratio 4, 1 request",
        "V4-Flash, ratio 4, 8 requests",
        "V4-Flash, ratio 0, 1 request",
    ]
    assert drawn.stacks[0].parts[:2] == (60, 30)
    assert drawn.stacks[0].parts[-1] == 10
    lines = readme_blocks(rows)["layer"]
    assert len(lines) == 2 + 4 + 2
    assert any("**0.90 slower**" in line and "| 8 |" in line for line in lines)
    assert "139" not in drawn.stacks[0].text


def test_sources_say_each_thing_once() -> None:
    assert source(PEERS) == (
        "NVIDIA H200; 2026-11-21; torch 2.11.0, triton 3.6.0; commit abc; `anymla bench gpu`"
    )
    more = {"cuda": "13.0", "commit": "def", "command": "anymla bench attention"}
    assert source([*PEERS, PEERS[0] | more]) == (
        "NVIDIA H200; 2026-11-21; torch 2.11.0, cuda 13.0, triton 3.6.0; commit abc, def; "
        "`anymla bench gpu`, `anymla bench attention`"
    )


def test_numbers_of_ticks() -> None:
    assert [short(value) for value in (0.25, 5, 1000, 4096, 65536, 1048576, 3e6)] == [
        "0.25", "5", "1,000", "4k", "64k", "1M", "3M",
    ]  # fmt: skip


def test_points_lie_where_their_numbers_say_and_say_them() -> None:
    points = (Point(1, 0, "first"), Point(10, 50, "middle"), Point(100, 100, "last"))
    figure = Figure("k", "t", "x", "", "", "y", (Series("s", points),), log_y=False)
    root = ElementTree.fromstring(svg(figure, NARROW))
    drawn = {
        use.findtext("title"): use for use in root.iter("use") if use.find("title") is not None
    }
    (x0, y0), (x1, y1), (x2, y2) = [
        (float(drawn[name].get("x")), float(drawn[name].get("y")))
        for name in ("first", "middle", "last")
    ]
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.2)


def test_a_drawing_takes_its_colours_from_the_page(plots) -> None:
    for kind in (Figure, Bars, Stacks, Ranges):
        plot = next(each for each in plots if isinstance(each, kind))
        text = svg(plot, WIDE)
        assert not re.findall("#[0-9a-f]{6}", text), plot.key
        used = set(re.findall(r"var\(--(\w+)\)", text))
        assert {"ink", "c0"} <= used <= set(LIGHT)


FIGURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))


def test_the_committed_drawings_are_those_of_the_rows(plots) -> None:
    """Their words are; where these stand follows matplotlib's version. If not: make tables."""
    known = {plot.key: plot for plot in plots}
    assert {"headline", "layer-parts"} <= {file.stem for file in FIGURES}
    for file in FIGURES:
        words = [words_of(text) for text in (file.read_text("utf-8"), svg_file(known[file.stem]))]
        assert words[0] == words[1], file.name
        assert "prefers-color-scheme: dark" in file.read_text("utf-8")


def words_of(text: str) -> list[str]:
    return re.findall(r"<(?:text|title)[^>]*>([^<]*)<", text)


def test_tables_of_a_document_are_renewed_between_their_marks(rows) -> None:
    text = "a\n<!-- decode: begin -->\nold\n<!-- decode: end -->\nb\n<!-- other: begin -->\n"
    new = with_blocks(text, readme_blocks(rows))
    assert new.startswith("a\n<!-- decode: begin -->\n| heads | 1 request | 8 |")
    assert "old" not in new
    assert new.endswith("<!-- decode: end -->\nb\n<!-- other: begin -->\n")
    assert with_blocks(new, readme_blocks(rows)) == new


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_tables_are_those_of_the_rows(document, rows) -> None:
    """If not: make tables."""
    text = document.read_text(encoding="utf-8")
    assert with_blocks(text, readme_blocks(rows)) == text


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
    rows = newest(rows)
    table = next(each for each in tables(rows) if each.key == "conformance")
    assert table.head == ["case", "what must hold", "torch (CPU)", "theirs (NVIDIA H200)"]
    assert table.body == [["L6", "holds", "", "ok"], ["A1", "holds", "-", "!fails"]]
    lines = readme_blocks(rows)["conformance"]
    assert "| A1 | holds | - | **fails** |" in lines
    assert lines[-1] == "- theirs (NVIDIA H200), A1: lost"


def test_what_the_doctor_said(tmp_path) -> None:
    file = tmp_path / "doctor.jsonl"
    words = ["doctor", "--device", "cpu", "--family", "selection"]
    result = CliRunner().invoke(main, [*words, "--json", str(file)])
    assert result.exit_code == 0, result.output
    table = next(each for each in tables(load_rows(tmp_path)) if "doctor" in each.key)
    assert ["selection: window_rows", "right", "", "", "torch", "native"] in table.body
    assert "`anymla doctor`" in table.source


def test_passkeys_that_were_lost_are_counted_by_length():
    rows = [
        {
            "part": "retrieval of a passkey",
            "case": f"{length} tokens, depth {depth}, {fault}",
            "device": "cpu",
            "length": length,
            "depth": depth,
            "fault": fault,
            "found": fault == "none" or depth == 0,
        }
        for length in (512, 2048)
        for depth in (0, 0.5)
        for fault in ("none", "sink dropped", "stale index rows")
    ]
    for row in rows:
        row["found"] |= row["fault"] == "sink dropped"
    other = {"engine": "vLLM with the plugin", "fault": "none", "case": "other"}
    (figure,) = figures([*rows, *(row | other for row in rows[:1])])
    assert figure.key == "retrieval"
    right, stale = figure.series  # lines that would cover each other are one
    assert right.name == "nothing broken; sink dropped; vLLM with the plugin (to 512)"
    assert [point.y for point in right.points] == [100, 100]
    assert [(point.x, point.y) for point in stale.points] == [(512, 50), (2048, 50)]
    assert stale.points[0].label == (
        "stale index rows, 512 tokens: 1 of 2 found; lost at depths 0.5"
    )
    assert figure.y_label == "% found, of 1 or 2 depths"


def test_figures_of_two_devices_are_told_apart() -> None:
    """As two rooflines, of which the second, of fewer rows, names its device."""

    def rows(device: str, count: int) -> list[dict[str, object]]:
        common = {"file": "a.jsonl", "device": device, "cuda": "13.0", "part": "device"}
        ceilings = [
            common | {"case": "copy", "tb_per_s": 4.0},
            common | {"case": "bf16 product 8192^3", "tflops": 700.0},
        ]
        timed = [
            row | {"device": device}
            for row in newest(load_rows(RESULTS))
            if row.get("part") == "experts" and row.get("device") == "NVIDIA H200"
        ]
        return ceilings + timed[:count]

    made = [each for each in figures(rows("One", 2) + rows("Two", 5)) if "roof" in each.title]
    assert [(each.key, each.title) for each in made] == [
        ("roofline", "How close to the roof"),
        ("roofline-2", "How close to the roof, One"),
    ]


def test_rows_of_v41_are_shown_of_the_device_that_was_measured_last() -> None:
    part = {"part": "decode attention over V4.1's rows beside V4's", "command": "c"}
    old = part | {"device": "One", "date": "2026-01-01", "case": "first", "v4_us": 2.0}
    old |= {"fp8_us": 2.0, "nvfp4_us": 4.0, "ratio": 0.5, "met": False}
    new = part | {"device": "Two", "date": "2026-01-02", "case": "second", "v4_us": 3.0}
    new |= {"nvfp4_us": 2.0, "ratio": 1.5, "met": True}
    lines = decode_blocks([old, new])["decode_v41"]
    assert [line for line in lines if "first" in line or "second" in line] == [
        "| second | 3.0 | - | 2.0 | - | 1.50 |"
    ]
    assert decode_blocks([]) == {}
