"""``python -m lab report``: drawings and tables of README.md and docs from recorded rows."""

from __future__ import annotations

from pathlib import Path

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input


@commands.command(
    examples=["python -m lab report --svg figures", "python -m lab report --tables README.md"]
)
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("benchmarks/results"),
    show_default=True,
    help="Folder of *.jsonl files.",
)
@click.option(
    "--svg",
    "drawings",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the drawings here, a file each.",
)
@click.option("--figure", "keys", multiple=True, metavar="KEY", help="Only these of --svg.")
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
    results: Path, drawings: Path | None, keys: tuple[str, ...], documents: tuple[Path, ...]
) -> None:
    """Renew the drawings and tables of documents from every recorded measurement.

    A newer row of the same thing supersedes the older. Drawings need the extra "report":
    pip install '.[report]' in a clone.
    """
    from anymla.formats.untrusted import read_bytes
    from lab.page.documents import readme_blocks, with_blocks
    from lab.page.draw import svg_file
    from lab.page.headline import headline
    from lab.page.layers import usual_layer_parts
    from lab.page.newest import newest
    from lab.page.rows import load_rows

    if keys and drawings is None:
        raise BadInput("--figure chooses among the plots of --svg, which is not given")
    if drawings is None and not documents:
        raise BadInput("one of --svg and --tables is needed")
    with bad_input():
        rows = newest(load_rows(results))
        if documents:
            blocks = readme_blocks(rows)
            for document in documents:
                text = read_bytes(document).decode("utf-8")
                document.write_text(with_blocks(text, blocks), encoding="utf-8")
        if drawings is None:
            return
        known = {plot.key: plot for plot in (headline(rows), usual_layer_parts(rows)) if plot}
        if unknown := set(keys) - set(known):
            raise BadInput(f"--figure {min(unknown)}: there are {', '.join(known)}")
        drawings.mkdir(parents=True, exist_ok=True)
        try:
            for key in keys or known:
                (drawings / f"{key}.svg").write_text(svg_file(known[key]), encoding="utf-8")
        except ImportError as error:
            raise BadInput(
                f"drawings need matplotlib: pip install '.[report]' in a clone of anymla ({error})"
            ) from error
