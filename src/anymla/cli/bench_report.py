"""``anymla bench report``: a page, plots and tables from the recorded rows."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import OutputFile, write_text


@click.command()
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("benchmarks/results"),
    show_default=True,
    help="Folder of *.jsonl files.",
)
@click.option(
    "--output",
    type=OutputFile(),
    default=Path("report.html"),
    show_default=True,
    help="The page.",
)
@click.option(
    "--png",
    "plots",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the plots here as well (needs matplotlib: pip install '.[report]').",
)
@click.option("--figure", "keys", multiple=True, metavar="KEY", help="Only these plots.")
@click.option(
    "--tables",
    "documents",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Renew the tables between <!-- name: begin --> and <!-- name: end --> in this Markdown "
    "file (names: support, decode, layer, peers, conformance); repeatable.",
)
def report(
    results: Path,
    output: Path,
    plots: Path | None,
    keys: tuple[str, ...],
    documents: tuple[Path, ...],
) -> None:
    """Write one HTML page with every recorded measurement.

    It needs no network, follows the reader's colour scheme, and fits a phone. Every figure says
    where its rows come from; what falls short is on it.
    """
    from anymla.bench.environment import environment
    from anymla.bench.page.calculated import cache_by_context
    from anymla.bench.page.documents import readme_blocks, with_blocks
    from anymla.bench.page.figures import figures
    from anymla.bench.page.html import page
    from anymla.bench.page.rows import load_rows
    from anymla.bench.page.tables import tables

    with bad_input():
        rows = load_rows(results)
        facts = environment("anymla bench report")
        day = f"{facts['date'][:10]}, commit {facts['commit']}; `anymla bench report`"
        drawn = [*figures(rows), cache_by_context(day)]
        listed = tables(rows, results)
        made = f"Made {facts['date']} from {len(rows)} rows by `anymla bench report`"
        if facts["commit"]:
            made += f", commit {facts['commit']}"
        write_text(output, page(drawn, listed, made))
        click.echo(f"{output}: {len(drawn)} figures, {len(listed)} tables, {len(rows)} rows")
        for document in documents:
            text = document.read_text(encoding="utf-8")
            document.write_text(with_blocks(text, readme_blocks(rows, results)), encoding="utf-8")
    if plots is None:
        return
    from anymla.bench.page.png import write_png

    plots.mkdir(parents=True, exist_ok=True)
    unknown = set(keys) - {figure.key for figure in drawn}
    if unknown:
        known = ", ".join(figure.key for figure in drawn)
        raise BadInput(f"--figure {min(unknown)}: there are {known}")
    for figure in drawn:
        if keys and figure.key not in keys:
            continue
        try:
            write_png(figure, plots / f"{figure.key}.png")
        except ImportError as error:
            raise BadInput(
                f"--png needs matplotlib: pip install '.[report]' in a clone of anymla ({error})"
            ) from error
