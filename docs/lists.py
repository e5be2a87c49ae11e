"""Lists in README.md and docs/architecture.md that are made from the tree and from recorded rows.

``python docs/lists.py`` (a part of ``make tables``) writes them between their marks.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Packages beside anymla's own, below the root; a clone may lack them.
BESIDE = ("src/crossrun", "lab")
# Columns of the table of families: the targets of which one is enough.
PLACES = {
    "Hopper": ("sm_90",),
    "older NVIDIA": ("sm_80", "sm_86", "sm_89"),
    "Blackwell": ("sm_100", "sm_120", "sm_121"),
    "AMD": ("gfx942", "gfx950", "gfx1151", "gfx1201"),
    "Intel": ("xpu_pvc", "xpu_dg2", "xpu_bmg"),
}
EXECUTED, STOOD_IN, BUILT, NONE = "●", "◐", "○", "-"


def summary(package: Path) -> str:
    """Return the first sentence of a package's docstring, without its full stop."""
    module = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    text = " ".join((ast.get_docstring(module) or "").partition("\n\n")[0].split())
    return text.removesuffix(".").replace("``", "`")


def rooms() -> list[str]:
    """Lines of the table of packages, from the bottom of the import contract to its top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    names = [name.strip() for layer in reversed(layers) for name in layer.split("|")]
    own = [ROOT / "src" / Path(*name.split(".")) for name in names if name.startswith("anymla.")]
    beside = [ROOT / name for name in BESIDE]
    lines = ["| package | holds |", "|---|---|"]
    for package in own + [path for path in beside if path.is_dir()]:
        name = package.relative_to(ROOT if package in beside else ROOT / "src" / "anymla")
        lines.append(f"| `{name}/` | {summary(package)} |")
    return lines


def families() -> list[str]:
    """Lines of the table of operation families, as far as something of them is recorded."""
    right = [row for row in _rows("gpu_tests.jsonl") if row["passed"] and not row["failed"]]
    ran = {(row["family"], row["target"]) for row in right if " as " not in row["device"]}
    stood_in = {row["target"] for row in right if row["family"] == "all"}
    built = {
        (row["module"].removeprefix("anymla.ops.").partition(".")[0], row["target"])
        for row in _rows("build_matrix.jsonl")
        if row["ok"]
    }
    lines = ["| family | CPU | " + " | ".join(PLACES) + " |", "|---|" + ":-:|" * (len(PLACES) + 1)]
    for package in sorted((ROOT / "src" / "anymla" / "ops").glob("*/__init__.py")):
        name = package.parent.name
        cells = [
            EXECUTED
            if any((name, target) in ran for target in targets)
            else STOOD_IN
            if stood_in & {*targets}
            else BUILT
            if any((name, target) in built for target in targets)
            else NONE
            for targets in PLACES.values()
        ]
        if set(cells) != {NONE}:
            lines.append(f"| `{name}` | {EXECUTED} | " + " | ".join(cells) + " |")
    return lines


def _rows(name: str) -> Iterable[dict]:
    with (RESULTS / name).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


LISTS = {
    ROOT / "README.md": ("families", families),
    ROOT / "docs" / "architecture.md": ("rooms", rooms),
}


def between(text: str, key: str) -> tuple[str, str, str]:
    """Split a page into what is before, between and behind the marks of a list."""
    begin, end = f"<!-- {key}: begin -->\n", f"\n<!-- {key}: end -->"
    before, _, rest = text.partition(begin)
    inside, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"there is no {begin.strip()} with {end.strip()} behind it")
    return before + begin, inside, end + after


def main() -> None:
    """Write every list between its marks."""
    for path, (key, lines) in LISTS.items():
        before, _, after = between(path.read_text(encoding="utf-8"), key)
        path.write_text(before + "\n".join(lines()) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
