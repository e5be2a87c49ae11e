"""``python -m lab report``: a page, plots and tables from the recorded rows."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import OutputFile, write_text


@commands.command(examples=["python -m lab report --output report.html"])
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
    help="The page; report.html where neither --svg nor --tables is given.",
)
@click.option(
    "--svg",
    "drawings",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the plots here, a file each.",
)
@click.option("--figure", "keys", multiple=True, metavar="KEY", help="Only these plots for --svg.")
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
    output: Path | None,
    drawings: Path | None,
    keys: tuple[str, ...],
    documents: tuple[Path, ...],
) -> None:
    """Write one HTML page with every recorded measurement.

    It needs no network, follows the reader's colour scheme, and fits a phone. Every figure says
    where its rows come from; what falls short is on it. A newer row of the same thing supersedes
    the older. Plots need the extra "report": pip install '.[report]' in a clone.
    """
    from anymla.bench.environment import environment
    from anymla.formats.untrusted import read_bytes
    from lab.page.calculated import cache_by_context
    from lab.page.documents import readme_blocks, with_blocks
    from lab.page.draw import svg_file
    from lab.page.figures import figures
    from lab.page.headline import headline, sentences
    from lab.page.newest import newest
    from lab.page.page import FirstScreen, page
    from lab.page.peers import decode_by_heads
    from lab.page.rows import load_rows
    from lab.page.tables import tables

    if keys and drawings is None:
        raise BadInput("--figure chooses among the plots of --svg, which is not given")
    with bad_input():
        recorded = load_rows(results)
        rows = newest(recorded)
        if documents:
            blocks = readme_blocks(rows)
            for document in documents:
                text = read_bytes(document).decode("utf-8")
                document.write_text(with_blocks(text, blocks), encoding="utf-8")
            if output is None and drawings is None:
                return
        facts = environment("python -m lab report")
        day = f"{facts['date'][:10]}, commit {facts['commit']}; `python -m lab report`"
        first = headline(rows)
        drawn = [*figures(rows), cache_by_context(day)]
        try:
            if drawings is not None:
                known = {each.key: each for each in ([first] if first else []) + drawn}
                if unknown := set(keys) - set(known):
                    raise BadInput(f"--figure {min(unknown)}: there are {', '.join(known)}")
                drawings.mkdir(parents=True, exist_ok=True)
                for key in keys or known:
                    (drawings / f"{key}.svg").write_text(svg_file(known[key]), encoding="utf-8")
            if output is None and drawings is not None:
                return
            output = output or Path("report.html")
            made = f"Made {facts['date']} by `python -m lab report` from the newest {len(rows):,} "
            made += f"of {len(recorded):,} rows"
            made += f", commit {facts['commit']}" if facts["commit"] else ""
            screen = FirstScreen(sentences(rows), first, decode_by_heads(rows))
            write_text(output, page(screen, drawn, tables(rows), made))
        except ImportError as error:
            raise BadInput(
                "plots need matplotlib and jinja2: pip install '.[report]' in a clone of anymla "
                f"({error})"
            ) from error
    click.echo(f"{output}: {len(drawn) + bool(first)} figures, {len(rows)} rows")
