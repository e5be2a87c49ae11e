"""Whether warps meet before one of their threads arrives at an mbarrier for them all.

Triton lets one thread of a partition arrive. That releases what this thread can see; what the other
warps have done with shared memory it sees only if they met before, behind their last access. The
order of barriers between partitions, which tests run on the host, means nothing without it.
"""

from __future__ import annotations

import re

_ARRIVES = re.compile(r"^\s*@%p\d+\s+mbarrier\.arrive\.shared", re.MULTILINE)
_MEETS = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.sync\b")
_ACCESS = re.compile(
    r"\b(?:ld|st|atom|red)\.[\w.:]*shared|\b(?:st|ld)matrix\b|\bwgmma\.(?:mma|wait)|\bcp\.async"
)
_LABEL = re.compile(r"^\$L")


def unmet_arrivals(ptx: str) -> list[str]:
    """Arrivals by one thread with an access of shared memory, or a label, after the last barrier.

    Arrivals that announce bytes, and those that a kernel writes itself, are not looked at.
    """
    found, met = [], False
    for line in ptx.splitlines():
        if _ARRIVES.search(line):
            if not met:
                found.append(line.strip())
        elif _MEETS.search(line):
            met = True
        elif _ACCESS.search(line) or _LABEL.search(line):
            met = False
    return found
