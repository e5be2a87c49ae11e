"""Compare the code that two states of the kernels compile to, names aside.

A move, a merge or a renaming leaves every build's code as it was. ``record`` writes one row per
build with a digest of its code, without function names, lines and debug sections; ``compare``
pairs the rows of two records by digest alone, because labels and files may have changed.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from anymla.ops.device import TARGETS
from lab import build_matrix
from lab.build_matrix import Job

DEFAULT_TARGETS = ("sm_90", "gfx942")

_SYMBOL = re.compile(r"(?:\.func|\.entry|\.type)\b[^\n@]*?\s@?([A-Za-z_$][\w$.]*)\s*[(,\n]")
# Labels of line numbers (.Ltmp, $L__tmp) are referred to in debug sections alone.
_DROPPED = re.compile(
    r"^\s*(?:\.loc\b|\.file\b|\.ident\b|//|;|(?:\.Ltmp|\$L__tmp)\d+:).*$|\s*//.*$|\s+;.*$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Builds of one record whose code the other lacks.

    Attributes:
        only_before: "target label" of builds whose code has gone.
        only_after: "target label" of builds whose code is new.
        same: number of pairs with the same code.
    """

    only_before: list[str]
    only_after: list[str]
    same: int


def normalised(code: str) -> str:
    """Remove names of functions, lines, comments and debug sections from PTX or AMD assembly."""
    code = re.split(r"^\s*\.section\s+\.debug", code, maxsplit=1, flags=re.MULTILINE)[0]
    code = _DROPPED.sub("", code)
    names = dict.fromkeys(_SYMBOL.findall(code))
    # Replace the longest first, since one name may begin another.
    for place, name in sorted(enumerate(names), key=lambda item: -len(item[1])):
        code = re.sub(
            rf"(?<![\w$])(\.L)?{re.escape(name)}(?=$|[^\w$]|_param)", rf"\g<1>F{place}", code
        )
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def record(chosen: list[Job], workers: int, cache: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per build: module, target, label, and ``code``, a digest, or ``problem``.

    Args:
        chosen: builds from ``build_matrix.jobs``.
        workers: number of compilations at a time.
        cache: folder that remembers digests of kernels whose source did not change.
    """
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda job: _remembered(job, cache), chosen)


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Difference:
    """Pair builds of two records by target and code, regardless of names and files."""
    old, new = (_by_code(rows) for rows in (before, after))
    only = [
        sorted(label for key, labels in (mine).items() for label in labels[len(other[key]) :])
        for mine, other in ((old, new), (new, old))
    ]
    same = sum(min(len(labels), len(new[key])) for key, labels in list(old.items()))
    return Difference(only[0], only[1], same)


def _by_code(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        code = row.get("code") or row["problem"]
        found[row["target"], code].append(f"{row['target']} {row['module']} {row['label']}")
    return found


def _remembered(job: Job, cache: Path | None) -> dict[str, Any]:
    row = {"module": job.module, "target": job.target, "label": job.label}
    import triton

    place = None if cache is None else cache / f"{triton.__version__}-{job.target}-{job.digest}"
    if place is not None and place.exists():
        return {**row, "code": place.read_text()}
    row |= build_matrix.apart(job, _digest_of_code)
    if place is not None and "code" in row:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Use a file of this thread alone. The name of a Triton version has a dot, which
        # ``with_suffix`` would cut.
        part = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
        part.write_text(row["code"])
        part.replace(place)
    return row


def _digest_of_code(job: Job) -> dict[str, Any]:
    from lab.compiled import compiled

    target, build = TARGETS[job.target], job.build
    kind = "amdgcn" if target.backend == "hip" else "ptx"
    try:
        with _without_assembler(target.backend):
            code = compiled(build, target).asm[kind]
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {str(error)[-200:]}"}
    return {"code": hashlib.sha256(normalised(code).encode()).hexdigest()[:20]}


class _without_assembler:
    """Skip the last stage of Triton's compiler, which takes half the time and is not compared."""

    def __init__(self, backend: str) -> None:
        from triton.backends import backends

        self._compiler: Any = backends["amd" if backend == "hip" else "nvidia"].compiler
        self._stages: Callable[..., None] = self._compiler.add_stages

    def __enter__(self) -> None:
        stages_of = self._stages

        def add_stages(compiler: Any, stages: dict[str, Any], *args: Any) -> None:
            stages_of(compiler, stages, *args)
            stages[list(stages)[-1]] = lambda source, metadata: b""

        self._compiler.add_stages = add_stages

    def __exit__(self, *_: object) -> None:
        self._compiler.add_stages = self._stages
