"""Docstrings are whole sentences: no fragments as first lines, nor as what an argument is.

``python tests/test_docstrings.py [FILE ...]`` prints the findings of files, or of all of them, and
exits with 1 if there are any. It needs nothing but Python's library.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [room for room in ("src", "lab") if (ROOT / room).is_dir()]

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
# Words that begin a clause or a phrase that only its context completes.
_FRAGMENT = re.compile(
    r"(?:of|what|whether|likewise|as|how|which|where|when|why|who|that|ditto|same|and|or)\b", re.I
)
_FIRST_LINE = re.compile(r"(?:what|whether|how|which|where|why|who|of|likewise|as)\b", re.I)
_LAST_WORDS = re.compile(r"\b(?:has|have|is told|of a call|of one call|of one)[.:]?$", re.I)
_NAME = re.compile(r"[*\w.]+(?:, [*\w.]+)*(?: \([^)]*\))?:")
_SHAPE_OR_DTYPE = re.compile(r"\[[^\]]*\]|\b(?:u?int\d+|b?float\d\w*|bool)\b")
_WORD = re.compile(r"[^\W\d_]")


class Finding(NamedTuple):
    """A fragment in a docstring, and where it stands."""

    path: str
    line: int
    said: str
    fault: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.fault}: {self.said}"


def first_line_fault(text: str) -> str | None:
    """Name what is wrong with the summary of a docstring, its first paragraph; None if nothing."""
    summary = " ".join(text.strip().partition("\n\n")[0].split())
    if _FIRST_LINE.match(summary.lstrip("`*")):
        return "first line begins with a fragment"
    if _LAST_WORDS.search(summary):
        return "first line ends in a fragment"
    return None


def entry_fault(text: str) -> str | None:
    """Name what is wrong with the text of one entry of a section; None if nothing."""
    said = " ".join(text.split()).lstrip("`*")
    if _FRAGMENT.match(said):
        return "entry begins with a fragment"
    words = [word for word in _SHAPE_OR_DTYPE.sub(" ", said).split() if _WORD.search(word)]
    if len(words) < 3:
        return "entry of fewer than three words beside shape and dtype"
    return None


def entries(docstring: str) -> Iterator[tuple[int, str]]:
    """Yield line number within a cleaned docstring, and text, of every entry of its sections."""
    section, start, indent = False, 0, 0
    said: list[str] = []
    for number, line in enumerate([*docstring.splitlines(), "end"]):
        words = line.strip()
        depth = len(line) - len(line.lstrip())
        if not words:
            continue
        if said and depth <= indent:
            yield start, " ".join(said)
            said = []
        if depth == 0:
            section = words in SECTIONS
        elif section and said:
            said.append(words)
        elif section:
            name = _NAME.match(words)
            said = [words[name.end() :] if name else words]
            # A text without a name goes on with lines that are as deep.
            start, indent = number, depth if name else 0


def _documented(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        yield from _documented(node)


def findings(source: str, path: str) -> Iterator[Finding]:
    """Yield every fragment in the docstrings of a module's text."""
    tree = ast.parse(source)
    for node in (tree, *_documented(tree)):
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        line = node.body[0].lineno
        if fault := first_line_fault(docstring):
            yield Finding(path, line, docstring.splitlines()[0], fault)
        for number, said in entries(docstring):
            if fault := entry_fault(said):
                yield Finding(path, line + number, docstring.splitlines()[number].strip(), fault)


def all_findings() -> list[Finding]:
    """List the findings of every file of the rooms."""
    return [
        finding
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for finding in findings(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def test_docstrings_are_whole_sentences() -> None:
    found = all_findings()
    assert not found, "\n".join(map(str, found))


def test_first_lines() -> None:
    for bad in (
        "What ``select_topk`` is told for some of them.",
        "Whether something may still be in the making.",
        "How many rows a tile holds.",
        "What a kernel\nhas.",
        "Numbers that one launch has.",
        "The rows of a call.",
        "`What` it is.",
    ):
        assert first_line_fault(bad), bad
    for good in (
        "Quantise rows to e4m3.",
        "True if another stream may still be writing this buffer.",
        "Whole pages of a cache.",
        "Return the tile that a call of ``linear`` takes.\n\nWhat follows may say what it has.",
    ):
        assert first_line_fault(good) is None, good


def test_entries() -> None:
    for bad in (
        "of the ring.",
        "what it holds, in bytes.",
        "Whether q is rotated.",
        "likewise, for w2 alone.",
        "as for ``linear``, see there.",
        "[T, H, 512] bfloat16.",
        "the queries, float32 [T, K].",
        "",
    ):
        assert entry_fault(bad), bad
    for good in (
        "rotated queries of all heads, [T, H, 512] bfloat16.",
        "offset of the first row, in bytes.",
        "True to rotate q by position.",
        "if a dtype is not supported.",
    ):
        assert entry_fault(good) is None, good


DOCUMENTED = '''
"""Of modules."""

class Kept:
    """Rows that a cache keeps.

    Attributes:
        rows: [T, 512] of
            the cache, one of which is left out.
        width, depth (int): channels.
    """

    def method(self):
        """Whether it is.

        Some text: of no section.

        Args:
            a: of what is said.

            b: rows of the cache by slot, [T, 512].
            *rest: likewise.

        Returns:
            As many rows as there are, in an order that
            nobody knows: of them.

        Raises:
            TypeError, ValueError: wrong dtype.
        """

@triton.jit
def kernel():
    """What a kernel does."""

@jit.prepared(x)
async def function():
    def inner():
        """How inner functions are found, too."""
'''


def test_findings_name_their_lines() -> None:
    found = [(finding.line, finding.said) for finding in findings(DOCUMENTED, "a.py")]
    assert found == [
        (2, "Of modules."),
        (10, "width, depth (int): channels."),
        (14, "Whether it is."),
        (19, "a: of what is said."),
        (22, "*rest: likewise."),
        (25, "As many rows as there are, in an order that"),
        (29, "TypeError, ValueError: wrong dtype."),
        (34, "What a kernel does."),
        (39, "How inner functions are found, too."),
    ]


def main(arguments: list[str]) -> int:
    """Print the findings of the files named, or of all files; return 1 if there are any."""
    names = {str(Path(name).resolve()) for name in arguments}
    found = [one for one in all_findings() if not names or str(ROOT / one.path) in names]
    print("".join(f"{finding}\n" for finding in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
