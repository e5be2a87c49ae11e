import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from anymla.cli.main import main
from anymla.formats.cache_dump import load_cache, save_cache
from anymla.formats.page_layout import get_layout


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def report_of(out: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    result = inspect(*arguments, "--json", out)
    assert result.exit_code == code, result.output
    return dict(json.loads(out.read_text()))


def copy(tiny: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """The checkpoint with some tensors replaced, added or (None) taken away."""
    target.mkdir()
    (target / "config.json").write_text((tiny / "config.json").read_text())
    tensors = load_file(tiny / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors")
    return target


def test_what_is_in_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    report = report_of(tmp_path / "out.json", "--checkpoint", tiny)
    tensors = load_file(tiny / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert report["ok"] is True
    assert (report["tensors"], report["bytes"], report["files"]) == (len(tensors), total, 1)
    assert (report["layers"], report["compress_ratios"]) == (3, [0, 4, 128])
    assert report["mtp_layers"] == report["mtp_layers_declared"] == 1
    for table in ("parts", "kinds"):
        assert sum(row["tensors"] for row in report[table].values()) == len(tensors)
        assert sum(row["bytes"] for row in report[table].values()) == total
    assert "other" not in report["parts"]
    routed = [n for n in tensors if n.startswith("layers.") and ".ffn.experts." in n]
    assert report["parts"]["routed experts"]["tensors"] == len(routed) == 3 * 8 * 3 * 2
    experts = [n for n in tensors if ".ffn.experts." in n]
    assert report["kinds"]["mxfp4 linear layers"]["tensors"] == len(experts)
    assert report["missing"] == report["unexpected"] == report["wrong"] == []


def test_cache_bytes_from_the_page_tables(tiny: Path, tmp_path: Path) -> None:
    cache = report_of(tmp_path / "out.json", "--checkpoint", tiny)["cache"]
    held = {group["name"]: group["held_bytes"] for group in cache["groups"]}
    # Pages held at 8192 tokens, by hand. A window of 128 tokens touches three pages of 64; states
    # of 8 or 128 tokens touch three pages of 4, or 17 of 8.
    by_hand = {
        "window": 3 * 37440 * 4,
        "c4": 8192 // 256 * 37440,
        "index": 8192 // 256 * 8640,
        "c128": 8192 // 256 * 1728,
        "state_c4": 3 * 32832,
        "state_index": 3 * 8640,
        "state_c128": 17 * 32832,
    }
    assert {name: sizes["8192"] for name, sizes in held.items()} == by_hand
    assert cache["total_bytes"]["8192"] == sum(by_hand.values())
    assert cache["bytes_per_token"]["8192"] == sum(by_hand.values()) / 8192
    # This model's longest position, and not beyond.
    assert list(cache["total_bytes"]) == ["1024", "8192", "65536"]


def test_a_dspark_drafter_is_explained(tiny_dspark: Path, tmp_path: Path) -> None:
    report = report_of(tmp_path / "out.json", "--checkpoint", tiny_dspark)
    assert report["ok"] is True
    assert report["mtp_layers"] == 0
    assert report["dspark"] == {
        "stages": 3,
        "block_size": 5,
        "noise_token_id": 271,
        "target_layer_ids": [0, 1, 2],
        "taps_at_entry": False,
        "markov_rank": 16,
        "experts": 8,
        "experts_per_token": 2,
        "confidence": True,
    }
    assert {group["name"]: group["layers"] for group in report["cache"]["groups"]}["window"] == 6
    lines = inspect("--checkpoint", tiny_dspark).stdout
    assert "ratios 0,4,128; DSpark drafter of 3 stages; experts 8\n" in lines
    assert (
        "drafts blocks of 5 tokens (noise token 271) from the streams behind layers 0, 1, 2; "
        "Markov rank 16, a confidence head; " in lines
    )


def test_a_stage_that_is_not_there(tiny_dspark: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_dspark / "model.safetensors")
    drop = {name: None for name in tensors if name.startswith("mtp.2.")}
    directory = copy(tiny_dspark, tmp_path / "two", **drop)
    result = inspect("--checkpoint", directory)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("hold 2 draft stages, compress_ratios in config.json has 3")


def test_plain_rows_take_more(tiny: Path, tmp_path: Path) -> None:
    totals = [
        report_of(tmp_path / "out.json", "--checkpoint", tiny, "--kv-cache", rows)["cache"][
            "total_bytes"
        ]["65536"]
        for rows in ("fp8", "bf16", "fp32")
    ]
    assert totals == sorted(totals)
    assert len(set(totals)) == 3


def test_readable_output(tiny: Path) -> None:
    result = inspect("--checkpoint", tiny)
    assert result.exit_code == 0
    assert result.output.startswith(f"{tiny}: ")
    for text in ("ratios 0,4,128; MTP layers 1 of 1 declared", "routed experts", "bytes a token"):
        assert text in result.output
    assert "missing" not in result.output


def test_what_is_missing_unexpected_and_wrong(tiny: Path, tmp_path: Path) -> None:
    changes = {
        "layers.1.attn.attn_sink": None,
        "layers.1.attn.k_norm.weight": torch.ones(2),
        "norm.weight": torch.ones(3),
    }
    directory = copy(tiny, tmp_path / "broken", **changes)
    report = report_of(tmp_path / "out.json", "--checkpoint", directory, code=1)
    assert report["ok"] is False
    assert report["missing"] == ["layers.1.attn.attn_sink"]
    assert report["unexpected"] == ["layers.1.attn.k_norm.weight"]
    assert report["wrong"] == ["norm.weight is F32 [3], must be BF16 or F16 or F32 [128]"]
    result = inspect("--checkpoint", directory)
    assert result.exit_code == 1
    assert "missing (1)\n  layers.1.attn.attn_sink\n" in result.output
    assert "unexpected (1)\n  layers.1.attn.k_norm.weight\n" in result.output


def test_declared_draft_layers_that_are_absent(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    drop = {name: None for name in tensors if name.startswith("mtp.")}
    report = report_of(
        tmp_path / "out.json", "--checkpoint", copy(tiny, tmp_path / "plain", **drop)
    )
    assert (report["ok"], report["mtp_layers"], report["mtp_layers_declared"]) == (True, 0, 1)
    shown = inspect("--checkpoint", tmp_path / "plain").output
    assert "ratios 0,4,128; MTP layers 0 of 1 declared, tensors absent; experts 8\n" in shown


def test_no_drafter_at_all(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    drop = {name: None for name in tensors if name.startswith("mtp.")}
    directory = copy(tiny, tmp_path / "plain", **drop)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    shown = inspect("--checkpoint", directory).output
    assert "ratios 0,4,128; no drafter; experts 8\n" in shown


def test_a_declared_drafter_that_is_absent(tiny_dspark: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_dspark / "model.safetensors")
    drop = {name: None for name in tensors if name.startswith("mtp.")}
    directory = copy(tiny_dspark, tmp_path / "plain", **drop)
    report = report_of(tmp_path / "out.json", "--checkpoint", directory)
    assert (report["ok"], report["dspark"], report["dspark_declared"]) == (True, None, True)
    shown = inspect("--checkpoint", directory).output
    assert "; DSpark drafter declared, tensors absent; experts " in shown


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two pages of three entries; four rows are final, one of them has a NaN, one is zero."""
    layout = get_layout("v4_main_fp8")
    cache = layout.allocate(2, 3, fill=0xFF)
    rows = torch.zeros(4, 512)
    rows[0, :2] = torch.tensor([1.0, -0.5])
    rows[1, :2] = torch.tensor([448.0, 1.0])
    rows[3, 511] = -3.0
    layout.write(cache, torch.arange(4), rows)
    data, _ = layout.planes(cache)
    data[0, 1, 5] = 0x7F
    save_cache(tmp_path / "page", cache, layout.layout_id, {"layer": 1, "rows": 4})
    return tmp_path / "page"


def test_what_is_in_a_page(dump: Path, tmp_path: Path) -> None:
    report = report_of(tmp_path / "out.json", "--cache", dump)
    assert report["layout_id"] == "v4_main_fp8"
    assert (report["pages"], report["entries_per_page"]) == (2, 3)
    assert report["page_stride_bytes"] == math.ceil(3 * 584 / 576) * 576
    assert report["meta"] == {"layer": 1, "rows": 4}
    assert (report["rows"], report["channels"]) == (4, 512)
    assert (report["nan_rows"], report["zero_rows"]) == (1, 1)
    values = report["decoded"]
    assert (values["nan"], values["inf"]) == (1, 0)
    assert (values["min"], values["max"]) == (-3.0, 448.0)
    # 1 and -0.5, 448 and 1, -3; one of 4 * 512 values is NaN.
    count = 4 * 512 - 1
    assert values["mean"] == pytest.approx((1 - 0.5 + 448 + 1 - 3) / count, rel=1e-12)
    squares = 1 + 0.25 + 448**2 + 1 + 9
    assert values["rms"] == pytest.approx((squares / count) ** 0.5, rel=1e-12)
    # Scale bytes 119, 127 and 105 (zero blocks) of the golden vectors; the last byte is padding.
    assert report["scale_byte_ranges"] == [[105, 127], *[[105, 105]] * 6, [0, 0]]


def test_a_page_in_words(dump: Path) -> None:
    result = inspect("--cache", dump)
    assert result.exit_code == 0
    assert f"{dump}: layout v4_main_fp8, 2 pages of 3 entries, page stride 2304" in result.output
    assert "rows 4 of 512 channels, 1 all zero, 1 with NaN\nNaN 1, infinite 0\n" in result.output
    assert "scale bytes 105..127 105..105 " in result.output


def test_every_row_counts_where_the_dump_does_not_say(tmp_path: Path) -> None:
    layout = get_layout("rows_fp32_128")
    cache = layout.allocate(1, 4)
    cache[0, 2] = torch.inf
    save_cache(tmp_path / "page", cache, layout.layout_id)
    report = report_of(tmp_path / "out.json", "--cache", tmp_path / "page")
    assert (report["rows"], report["zero_rows"], report["decoded"]["inf"]) == (4, 3, 128)
    assert report["scale_byte_ranges"] is None


def test_an_empty_dump(tmp_path: Path) -> None:
    layout = get_layout("v4_index_fp8")
    save_cache(tmp_path / "page", layout.allocate(0, 64), layout.layout_id)
    report = report_of(tmp_path / "out.json", "--cache", tmp_path / "page")
    assert (report["rows"], report["decoded"]["min"]) == (0, None)
    assert inspect("--cache", tmp_path / "page").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache", "fp8"], "give exactly one of --checkpoint and --cache"),
        (["a", "--checkpoint", "b"], "a: --checkpoint b is given as well"),
        (["--checkpoint", "a", "--cache", "b"], "give exactly one of --checkpoint and --cache"),
        (["--checkpoint", "{tmp}/none"], "{tmp}/none: no such directory"),
        (["--checkpoint", "{tmp}"], "{tmp}: not a checkpoint, it has no config.json"),
        (["--cache", "{tmp}/none"], "{tmp}/none: cannot be read as a cache dump: "),
        (["--cache", "{tiny}/model.safetensors"], "{tiny}/model.safetensors: not a cache dump"),
        (["--checkpoint", "{tiny}", "--json", "{tmp}/a/b"], "--json {tmp}/a/b: there is no dir"),
        (["--cache", "a", "--verify", "--compare", "b"], "--compare and --convert go alone"),
        (["--checkpoint", "{tiny}", "--row", "0"], "--verify, --compare, --convert, --layout, "),
    ],
)
def test_bad_input(arguments: list[str], message: str, tiny: Path, tmp_path: Path) -> None:
    where = {"tmp": tmp_path, "tiny": tiny}
    result = inspect(*[argument.format(**where) for argument in arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: " + message.format(**where))
    assert result.stderr.count("\n") == 1


def test_truncated_checkpoint(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "short")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    result = inspect("--checkpoint", directory)
    assert result.exit_code == 2
    assert "model.safetensors: truncated or overwritten" in result.stderr


def filled_dump(path: Path, layout_id: str = "v4_main_fp8", rows: int = 20) -> Path:
    layout = get_layout(layout_id)
    cache = layout.allocate(2, 16)
    layout.write(cache, torch.arange(rows), torch.randn(rows, layout.channels))
    save_cache(path, cache, layout_id, {"rows": rows})
    return path


def test_a_clean_cache_verifies(tmp_path: Path) -> None:
    result = inspect("--cache", filled_dump(tmp_path / "a"), "--verify")
    assert result.exit_code == 0
    assert result.output.endswith("verified: nothing wrong\n")


def test_problems_end_with_1(dump: Path, tmp_path: Path) -> None:
    result = inspect("--cache", dump, "--verify", "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "BAD  NaN: 1 rows that decode to NaN; first 1\n" in result.output
    found = json.loads((tmp_path / "out.json").read_text())["problems"]
    assert found[0]["kind"] == "NaN"


def test_one_row_in_numbers(dump: Path) -> None:
    result = inspect("--cache", dump, "--row", 1)
    assert "slot 1: page 0, entry 1\n    0         448" in result.output
    assert inspect("--cache", dump, "--row", 6).exit_code == 2


def test_equal_dumps_in_different_layouts(tmp_path: Path) -> None:
    one, other = filled_dump(tmp_path / "a"), tmp_path / "b"
    result = inspect("--cache", one, "--convert", "rows_bf16_512", "--output", other)
    assert result.exit_code == 0
    assert "20 rows, v4_main_fp8 to rows_bf16_512" in result.output
    assert "every value reads back as it was" in result.output
    result = inspect("--cache", one, "--compare", other)
    assert (result.exit_code, result.output) == (0, "20 rows compared, 0 differ\nequal\n")


def test_different_dumps(tmp_path: Path) -> None:
    layout, other = get_layout("rows_fp32_512"), tmp_path / "b"
    one = filled_dump(tmp_path / "a", "rows_fp32_512")
    cache, layout_id, meta = load_cache(one)
    cache[1, 2, 300] += 1
    save_cache(other, cache, layout_id, meta | {"rows": 19})
    result = inspect("--cache", one, "--compare", other, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "19 rows compared, 1 differ\nfinal rows: 20 and 19\n" in result.output
    assert "first at slot 18, channel 300" in result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["values_that_differ"] == 1
    assert report["largest_difference"] == pytest.approx(1, rel=1e-6)
    result = inspect("--cache", one, "--compare", filled_dump(tmp_path / "c", "v4_index_fp8"))
    assert result.exit_code == 2
    assert "holds rows of 512 channels" in result.output
    assert layout.channels == 512


def test_a_lossy_conversion_says_what_it_cost(tmp_path: Path) -> None:
    one = filled_dump(tmp_path / "a", "v4_index_fp8")
    result = inspect("--cache", one, "--convert", "v4_index_mxfp4", "--output", tmp_path / "b")
    assert result.exit_code == 0
    assert "of the values were rounded, at most by" in result.output
    _, layout_id, meta = load_cache(tmp_path / "b")
    assert (layout_id, meta["converted_from"]) == ("v4_index_mxfp4", "v4_index_fp8")


def test_a_pages_bare_bytes(tmp_path: Path) -> None:
    layout = get_layout("v4_main_fp8")
    cache = layout.allocate(1, 64)
    layout.write(cache, torch.arange(64), torch.randn(64, 512))
    (tmp_path / "page").write_bytes(bytes(cache.untyped_storage()))
    words = ("--cache", tmp_path / "page", "--layout", "v4_main_fp8", "--entries", 64)
    result = inspect(*words, "--verify")
    assert (result.exit_code, "verified: nothing wrong" in result.output) == (0, True)
    result = inspect(*words, "--convert", "rows_bf16_512", "--output", tmp_path / "b")
    assert result.exit_code == 0
    assert load_cache(tmp_path / "b")[1] == "rows_bf16_512"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "v4_index_fp8"], "holds layout v4_main_fp8, not v4_index_fp8"),
        (["--convert", "v9", "--output", "{tmp}/out"], "unknown cache layout 'v9'; known: "),
        (["--convert", "v4_index_fp8", "--output", "{tmp}/out"], "neither can become the other"),
        (["--convert", "rows_bf16_512"], "--convert and --output go together"),
        (["--entries", "64"], "--entries is for a page's bare bytes"),
        (["--convert", "rows_bf16_512", "--output", "{tmp}/no/out"], "there is no directory"),
    ],
)
def test_what_cannot_be_done_writes_nothing(words, message, tmp_path: Path) -> None:
    one = filled_dump(tmp_path / "a")
    result = inspect("--cache", one, *[word.format(tmp=tmp_path) for word in words])
    assert result.exit_code == 2
    assert message in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_truncated_dump_writes_nothing(tmp_path: Path) -> None:
    one = filled_dump(tmp_path / "a")
    one.write_bytes(one.read_bytes()[:-7])
    result = inspect("--cache", one, "--convert", "rows_bf16_512", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "a: cannot be read as a cache dump" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_header_with_another_layout_is_refused(tmp_path: Path) -> None:
    one = filled_dump(tmp_path / "a", "v4_index_fp8")
    one.write_bytes(one.read_bytes().replace(b"v4_index_fp8", b"rows_fp32_51"))
    result = inspect("--cache", one)
    assert result.exit_code == 2
    assert "a: bad header: unknown cache layout 'rows_fp32_51'" in result.output
    one.write_bytes(one.read_bytes().replace(b"rows_fp32_51", b"rows_bf16_12"))
    assert inspect("--cache", one).exit_code == 2


def test_words_about_caches_need_one(tiny: Path) -> None:
    result = inspect("--checkpoint", tiny, "--verify")
    assert result.exit_code == 2
    assert "go with --cache" in result.output
