import json
import pathlib
import re
import sys

import pytest
from click.testing import CliRunner

from lab.__main__ import main
from lab.page.colours import LIGHT
from lab.page.decode import decode_blocks
from lab.page.documents import readme_blocks, with_blocks
from lab.page.draw import svg_file
from lab.page.headline import headline
from lab.page.layers import experts_table, usual_layer_parts
from lab.page.newest import newest
from lab.page.peers import peer_table
from lab.page.rows import case_of, load_rows, name_of, source
from lab.page.verdicts import conformance

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


@pytest.fixture(scope="module")
def rows():
    """The recorded rows that count."""
    return newest(load_rows(RESULTS))


@pytest.fixture(scope="module")
def plots(rows):
    """Everything that is drawn of them."""
    return [headline(rows), usual_layer_parts(rows)]


def test_tables_of_documents_need_no_plots(tmp_path, monkeypatch) -> None:
    for module in ("jinja2", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    document = tmp_path / "page.md"
    document.write_text("<!-- decode: begin -->\n<!-- decode: end -->\n")
    words = ["report", "--results", str(RESULTS), "--tables", str(document)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "| heads | 1 request | 8 |" in document.read_text()


def test_a_newer_row_of_the_same_thing_supersedes_the_older() -> None:
    """Whichever benchmark, backend, commit or versions made it."""
    old = {
        "part": "attention",
        "case": "sparse_attention, 32 tokens, 16 heads, 128 + 512 slots",
        "us": 23.34,
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
    assert kept[1] == new
    assert newest([new, xpu, old]) == [new, xpu]
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


def test_flash_is_never_said_alone(plots) -> None:
    """Beside FlashMLA it would be read as that: the model is V4-Flash."""
    assert name_of({"case": "flash, ratio 4, batch 8"}) == "V4-Flash, ratio 4, batch 8"
    assert name_of({"case": "pro wq_b 1 x 1"}) == "V4-Pro wq_b 1 x 1"
    for plot in plots:
        shown = " ".join(words_of(svg_file(plot)))
        assert not re.findall(r"(?<!V4-)\bFlash\b|(?<!sgl-)\bflash\b[^_]", shown)


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


def test_every_row_says_what_made_it() -> None:
    for row in load_rows(RESULTS):
        if row["file"] != "build_matrix.jsonl":  # whose rows have digests of what they built
            missing = {"date", "commit", "command", "device", "torch"} - {k for k in row if row[k]}
            assert not missing, (row["file"], case_of(row), missing)


def test_a_comparison_names_a_device_that_is_not_the_usual_one() -> None:
    rows = [{**row, "device": "card A"} for row in PEERS[:2]] + [{**PEERS[0], "device": "card B"}]
    cases = [line[0] for line in peer_table(rows).body]
    assert [case.endswith(", card B") for case in cases] == [False, False, True]
    assert not any("card A" in case for case in cases)
    assert peer_table([]).body == []


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
    drawn = usual_layer_parts(rows)
    assert drawn.key == "layer-parts"
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


def test_what_is_left_beside_the_experts() -> None:
    case = "flash, ratio 4, batch 8, context 8192, 256 experts"
    measured = {
        "part": "decode layer", "case": case, "us": 300.0, "roofline_us": 200.0, "launches": 30,
        "weights_mb": 900.0, "experts_mb": 750.0, "caches_mb": 100.0, "date": "2026-11-30",
        "device": "NVIDIA H200", "command": "python -m lab layer",
    }  # fmt: skip
    traced = {
        "part": "decode layer, timeline", "case": case, "us": 310.0, "idle_us": 4.0,
        "adds_us": {"moe": 180.0, "linear": 90.0, "attention": 36.0},
    }  # fmt: skip
    _, _, line, *_ = experts_table([measured, traced])
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "V4-Flash, ratio 4, 256 experts"
    assert cells[1:] == ["8,192", "8", "300", "200", "150", "180", "50", "126", "4", "30"]
    assert experts_table([measured]) == []


def test_sources_say_each_thing_once() -> None:
    assert source(PEERS) == (
        "NVIDIA H200; 2026-11-21; torch 2.11.0, triton 3.6.0; commit abc; `anymla bench gpu`"
    )
    more = {"cuda": "13.0", "commit": "def", "command": "anymla bench attention"}
    assert source([*PEERS, PEERS[0] | more]) == (
        "NVIDIA H200; 2026-11-21; torch 2.11.0, cuda 13.0, triton 3.6.0; commit abc, def; "
        "`anymla bench gpu`, `anymla bench attention`"
    )


def test_a_drawing_takes_its_colours_from_the_page(plots) -> None:
    for plot in plots:
        text = svg_file(plot)
        assert not re.findall("#[0-9a-f]{6}", text.partition("</style>")[2]), plot.key
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
    words = ["report", "--results", str(tmp_path), "--svg", str(tmp_path / "out")]
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
    table = conformance(rows)
    assert table.head == ["case", "what must hold", "torch (CPU)", "theirs (NVIDIA H200)"]
    assert table.body == [["L6", "holds", "", "ok"], ["A1", "holds", "-", "!fails"]]
    lines = readme_blocks(rows)["conformance"]
    assert "| A1 | holds | - | **fails** |" in lines
    assert lines[-1] == "- theirs (NVIDIA H200), A1: lost"


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
