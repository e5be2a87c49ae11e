"""Statements of PTX text, the order in which they run, and the shared memory that they access."""

from __future__ import annotations

import collections
import functools
import re

# Labels of jumps, and of tables of jumps. Labels of inline assembly stay in place.
_LABEL = re.compile(r"^\s*(\$L\w+|JTI\w+):", re.MULTILINE)
_IGNORED = re.compile(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b[^\n]*", re.MULTILINE)
_DEFINITION = re.compile(r"(?:@!?%p\d+\s+)?(\w+)[\w.:]*\s+(%\w+)\s*,\s*(.*)", re.DOTALL)
_JUMP = re.compile(r"(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L\w+)")
_VARIABLE = re.compile(r"\.shared\b.*?\.b8\s+(\w+)\s*\[")
# Distance between variables, larger than shared memory.
_APART = 1 << 32


class Code:
    """A kernel of one function, as Triton writes it.

    Attributes:
        statements: in the order of the text; labels are statements of their own.
    """

    def __init__(self, ptx: str) -> None:
        text = _LABEL.sub(r"\1:;", _IGNORED.sub("", ptx))
        self.statements = [part.strip("{} \t\n") for part in text.split(";")]
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._sources: dict[str, list[tuple[str, list[str]]]] = collections.defaultdict(list)
        names = [found[1] for part in self.statements if (found := _VARIABLE.search(part))]
        self._variables = {name: place * _APART for place, name in enumerate(names, 1)}
        self._known: dict[str, int] = {}
        last = ""
        for place, part in enumerate(self.statements):
            if part.endswith(":"):
                last = part.rstrip(":")
                self._labels[last] = place
            elif part.startswith(".branchtargets"):
                self._tables[last] = re.findall(r"\$L\w+", part)
            elif found := _DEFINITION.match(part):
                operands = [operand.strip() for operand in found[3].split(",")]
                self._sources[found[2]].append((found[1], operands))
        self._asked: set[str] = set()

    @functools.cached_property
    def following(self) -> list[list[int]]:
        """Return for every statement those that may run after it.

        Loops inside inline assembly, whose labels are its own, are not followed.
        """
        found = []
        for place, part in enumerate(self.statements):
            targets, falls = [], place + 1 < len(self.statements)
            if jump := _JUMP.match(part):
                if jump[2] in self._labels:
                    targets, falls = [jump[2]], bool(jump[1])
            elif part.startswith("brx"):
                targets, falls = self._tables[part.split(",")[1].strip()], False
            elif part in ("ret", "exit", "trap"):
                falls = False
            found.append([self._labels[name] for name in targets] + [place + 1] * falls)
        return found

    def address(self, part: str) -> int | None:
        """Return the lowest shared address that a statement may access, if variable parts are >= 0.

        Variables lie far apart, so this tells in which of a kernel's buffers a statement reads or
        writes: buffers begin at constants, and offsets into them begin at 0. None if the text does
        not determine the variable.
        """
        at = re.search(r"\[\s*([^\],]+)", part)
        lowest = self._lowest(at[1]) if at else None
        return lowest if lowest is not None and lowest > _APART // 2 else None

    def _lowest(self, operand: str) -> int | None:
        """Return the lowest value of an operand; None if it depends only on itself."""
        operand = operand.strip()
        if re.fullmatch(r"-?\d+", operand):
            return int(operand)
        if more := re.fullmatch(r"(\S+?)\s*\+\s*(-?\d+)", operand):
            return (self._lowest(more[1]) or 0) + int(more[2])
        if operand in self._known:
            return self._known[operand]
        if operand in self._asked:
            return None
        self._asked.add(operand)
        values = [self._result(*source) for source in self._sources.get(operand, ())]
        self._asked.discard(operand)
        there = [value for value in values if value is not None]
        if values and not there:
            return None
        self._known[operand] = min(there, default=self._variables.get(operand, 0))
        return self._known[operand]

    def _result(self, name: str, operands: list[str]) -> int | None:
        if name in ("mov", "cvt", "sub"):
            return self._lowest(operands[0])
        if name == "mad":
            return self._lowest(operands[2])
        if name not in ("add", "or", "selp", "shl"):
            return 0
        values = [self._lowest(operand) for operand in operands[:2]]
        there = [value for value in values if value is not None]
        if not there or (len(there) < 2 and name != "selp"):
            return None
        if name == "shl":
            return there[0] << there[1]
        if name == "add":
            return sum(there)
        return max(there) if name == "or" else min(there)
