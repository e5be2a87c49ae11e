"""``anymla inspect``: the contents of a checkpoint, or of a dumped cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.cache_lines import conversion_lines, difference_lines, problem_lines, row_lines
from anymla.cli.cache_report import (
    cache_report,
    difference_report,
    open_dump,
    problem_report,
    write_converted,
)
from anymla.cli.checkpoint_report import checkpoint_report
from anymla.cli.files import STANDARD, OutputFile, refuse_overwriting, write_text
from anymla.cli.numbers import Finite, count
from anymla.cli.run_options import checkpoint_options
from anymla.cli.terminal import say
from anymla.layers.caches import CACHE_FORMATS
from anymla.model.hub import local_checkpoint


@commands.command(
    examples=[
        "anymla inspect examples/tiny/checkpoint",
        "anymla inspect --cache dumps/request0.layer1.window.safetensors --verify",
    ],
    no_args_is_help=True,
)
@checkpoint_options
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A cache that anymla generate --dump-cache wrote.",
)
@click.option("--verify", is_flag=True, help="With --cache: look for what is wrong with it.")
@click.option(
    "--compare",
    "other",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --cache: compare the rows with another dump's, whatever its layout.",
)
@click.option(
    "--convert",
    metavar="LAYOUT",
    help="With --cache: write it in another layout, to --output.",
)
@click.option("--output", type=OutputFile(whole=True), metavar="FILE")
@click.option(
    "--layout",
    "page_layout",
    metavar="LAYOUT",
    help="Layout that --cache must have; with --entries, of a page's bare bytes.",
)
@count("--entries", help="--cache is no dump but the bytes of one page of so many entries.")
@count(
    "--row",
    "shown_row",
    metavar="SLOT",
    help="With --cache: print the values of one slot.",
    least=0,
)
@click.option(
    "--kv-cache",
    type=click.Choice(list(CACHE_FORMATS)),
    default="fp8",
    show_default=True,
    help="With --checkpoint: cache rows that the sizes are for.",
)
@click.option(
    "--memory",
    type=Finite(min=0, min_open=True),
    metavar="GB",
    help="With --checkpoint: which texts fit on GPUs of so much memory.",
)
@click.option(
    "--json",
    "json_file",
    type=OutputFile(allow_dash=True),
    metavar="FILE",
    help='Write the result here as well; "-" prints it instead.',
)
def command(
    checkpoint: Path | None,
    cache: Path | None,
    verify: bool,
    other: Path | None,
    convert: str | None,
    output: Path | None,
    page_layout: str | None,
    entries: int | None,
    shown_row: int | None,
    kv_cache: str,
    memory: float | None,
    json_file: Path | None,
) -> None:
    """Show what is in a checkpoint (tensors, sizes, what is missing) or in a dumped cache.

    For a checkpoint, also show the memory that it takes: weights by the number of GPUs that share
    it, and caches by the length of a text.

    A cache can be verified (NaN, scale bytes that no quantiser writes, padding, stale rows),
    compared with another one, and converted between layouts: FP8 pages, entries one after the
    other, bfloat16 or float32 rows, AMD's FNUZ codes, and FP8 or MXFP4 index keys.

    Ends with exit code 1 if the checkpoint could not be loaded as it is, if --verify finds
    something, or if --compare finds a difference.
    """
    if (checkpoint is None) == (cache is None):
        raise BadInput("give exactly one of --checkpoint and --cache")
    if cache is None and (
        verify or other or convert or entries or page_layout or shown_row is not None
    ):
        raise BadInput("--verify, --compare, --convert, --layout, --entries, --row go with --cache")
    if memory is not None and checkpoint is None:
        raise BadInput("--memory goes with --checkpoint")
    if sum(map(bool, (verify or shown_row is not None, other, convert))) > 1:
        raise BadInput("--compare and --convert go alone, without --verify and --row")
    if (convert is None) != (output is None):
        raise BadInput("--convert and --output go together")
    refuse_overwriting("--output", output, cache)
    refuse_overwriting("--json", json_file, cache, other, output)
    with bad_input():
        if checkpoint is not None:
            directory = local_checkpoint(checkpoint, weights=False)
            report = checkpoint_report(directory, kv_cache, memory)
            lines = _checkpoint_lines(report)
        else:
            assert cache is not None
            dump = open_dump(cache, page_layout, entries)
            if convert is not None and output is not None:
                report = write_converted(dump, convert, output)
                lines = conversion_lines(report)
            elif other is not None:
                report = difference_report(dump, open_dump(other))
                report["ok"] = report["equal"]
                lines = difference_lines(report)
            else:
                report = cache_report(dump)
                lines = _cache_lines(report)
                if verify:
                    report["problems"] = problem_report(dump)
                    report["ok"] = all(each["harmless"] for each in report["problems"])
                    lines += problem_lines(report["problems"])
                if shown_row is not None:
                    lines += row_lines(dump, shown_row)
        if json_file is not None:
            write_text(json_file, json.dumps(report, indent=1) + "\n")
    if json_file != STANDARD:
        say("\n".join(lines))
    if not report.get("ok", True):
        click.get_current_context().exit(1)


def _checkpoint_lines(report: dict[str, Any]) -> list[str]:
    ratios = ",".join(str(ratio) for ratio in report["compress_ratios"])
    dspark = report["dspark"]
    lines = [
        f"{report['directory']}: {report['tensors']} tensors in {report['files']} files, "
        f"{_size(report['bytes'])}",
        f"layers {report['layers']}, ratios {ratios}; {_drafter(report)}; "
        f"experts {report['experts']}",
    ]
    if dspark is not None:
        layers = "layers " + ", ".join(map(str, dspark["target_layer_ids"]))
        tapped = f"that {layers} begin with" if dspark["taps_at_entry"] else f"behind {layers}"
        lines.append(
            f"drafts blocks of {dspark['block_size']} tokens (noise token "
            f"{dspark['noise_token_id']}) from the streams {tapped}; Markov rank "
            f"{dspark['markov_rank']}, {'a' if dspark['confidence'] else 'no'} confidence head; "
            f"generate --speculate uses it, --drafts off leaves it unread"
        )
    if report["described"]:
        lines.append("no weights are here: sizes follow from config.json and the index")
    lines += _sharing_lines(report)
    lines += report["unread"]
    for title in ("parts", "kinds"):
        lines += ["", title]
        lines += [
            f"  {label:24}{sums['tensors']:>8} tensors {_size(sums['bytes']):>10}"
            for label, sums in report[title].items()
        ]
    for title in ("missing", "unexpected", "wrong"):
        if report[title]:
            lines += ["", f"{title} ({len(report[title])})"]
            lines += [f"  {item}" for item in report[title]]
    lines += ["", *_cache_size_lines(report["cache"])]
    return [*lines, "", *_plan_lines(report["plan"])]


def _drafter(report: dict[str, Any]) -> str:
    """Name the drafter, or the drafter that the configuration has but the files lack."""
    mtp, declared = report["mtp_layers"], report["mtp_layers_declared"]
    if report["dspark"] is not None:
        return f"DSpark drafter of {report['dspark']['stages']} stages"
    if report["dspark_declared"]:
        return "DSpark drafter declared, tensors absent"
    if not declared:
        return "no drafter"
    return f"MTP layers {mtp} of {declared} declared{'' if mtp else ', tensors absent'}"


def _sharing_lines(report: dict[str, Any]) -> list[str]:
    """Describe the layers that later layers share, and those that read n-grams."""
    lines = []
    sources, engram = report["sources"], report["engram"]
    if sources is not None:
        written, chosen = (", ".join(map(str, sources[name])) for name in ("kv", "index"))
        lines.append(f"layers that write entries: {written}; that select: {chosen}")
        candidates = sources["candidates"]
        if candidates is not None:
            lines.append(
                f"layer {candidates['source']} keeps {candidates['blocks']} blocks of "
                f"{candidates['block_size']} entries that later layers select within"
            )
    if engram is not None:
        read = ", ".join(map(str, engram["layer_ids"]))
        rows = ", ".join(map(str, engram["rows"]))
        lines.append(
            f"layers {read} read n-grams of up to {engram['max_ngram']} tokens: {rows} rows"
        )
    return lines


def _cache_size_lines(cache: dict[str, Any]) -> list[str]:
    """Format a table: groups down, context lengths across."""
    contexts = list(cache["total_bytes"])
    head = "".join(f"{length:>12}" for length in contexts)
    lines = [f"cache ({cache['format']}) of one request", f"  {'group':12}{'layers':>8}{head}"]
    for group in cache["groups"]:
        held = "".join(f"{_size(group['held_bytes'][length]):>12}" for length in contexts)
        lines.append(f"  {group['name']:12}{group['layers']:>8}{held}")
    total = "".join(f"{_size(held):>12}" for held in cache["total_bytes"].values())
    a_token = "".join(f"{held:>12.1f}" for held in cache["bytes_per_token"].values())
    return [*lines, f"  {'total':20}{total}", f"  {'bytes a token':20}{a_token}"]


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    """Format a table: GPUs that share the model across; weights and texts that fit, down."""
    ranks = plan["ranks"]

    def row(label: str, cells: list[str]) -> str:
        return f"  {label:20}" + "".join(f"{cell:>12}" for cell in cells)

    lines = ["memory of each GPU", row("GPUs", [str(count) for count in ranks])]
    lines.append(row("weights", [_size(each["weight_bytes"]) for each in ranks.values()]))
    fits = [each["fit"] for each in ranks.values()]
    if plan["memory_bytes"] is None or not fits:
        return lines
    lines.append(f"of {_size(plan['memory_bytes'])}, a tenth kept free")
    left = [_size(fit["free_bytes"]) if fit["free_bytes"] > 0 else "none" for fit in fits]
    lines.append(row("left for caches", left))
    lines.append(row("longest text", [str(fit["longest"] or "none") for fit in fits]))
    for length in fits[0]["texts"]:
        lines.append(row(f"texts of {length}", [str(fit["texts"][length]) for fit in fits]))
    return lines


def _cache_lines(report: dict[str, Any]) -> list[str]:
    values = report["decoded"]
    lines = [
        f"{report['file']}: layout {report['layout_id']}, {report['pages']} pages of "
        f"{report['entries_per_page']} entries, page stride {report['page_stride_bytes']} bytes",
        "meta " + json.dumps(report["meta"]),
        f"rows {report['rows']} of {report['channels']} channels, "
        f"{report['zero_rows']} all zero, {report['nan_rows']} with NaN",
        f"NaN {values['nan']}, infinite {values['inf']}",
    ]
    if values["min"] is not None:
        lines.append(
            f"decoded min {values['min']:.6g}, max {values['max']:.6g}, mean {values['mean']:.6g}, "
            f"rms {values['rms']:.6g}"
        )
    if report["data_byte_range"]:
        lines.append("value bytes {}..{}".format(*report["data_byte_range"]))
    if report["scale_byte_ranges"] and report["scale_byte_ranges"][0]:
        ranges = " ".join("{}..{}".format(*one) for one in report["scale_byte_ranges"])
        lines.append(f"scale bytes {ranges}")
    return lines


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
