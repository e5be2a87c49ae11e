"""Checks in a kernel's PTX, and before, that warps synchronise shared memory as they must.

Warps meet before one of their threads arrives at an mbarrier for them all. Triton lets one thread
of a partition arrive. That releases what this thread can see; what the other warps have done with
shared memory it sees only if they met before, behind their last access. The order of barriers
between partitions, which tests run on the host, means nothing without it.

Reads have arrived before TMA may write where they read. A barrier orders reads and
later writes of threads, not those of TMA: a read that is still under way when a buffer
is given back has been seen to find what was copied there next. A thread that has read such a buffer
executes fence.proxy.async before anybody is told. What the matrix unit reads has been waited for.

Every mbarrier that is initialised is used. Triton takes the memory of one that is not for something
else, and an initialisation goes another way than a store: it has been seen to overwrite what was
stored there after it.
"""

from __future__ import annotations

import bisect
import re

from lab.ptx_code import Code

_ARRIVES = re.compile(r"^\s*@%p\d+\s+mbarrier\.arrive\.shared", re.MULTILINE)
_MEETS = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.sync\b")
_ACCESS = re.compile(
    r"\b(?:ld|st|atom|red)\.[\w.:]*shared|\b(?:st|ld)matrix\b|\bwgmma\.(?:mma|wait)|\bcp\.async"
)
# Nobody branches to what tells where a line of the source begins.
_LABEL = re.compile(r"^\$L(?!__tmp)")

_COPIES = re.compile(r"\bcp\.async\.bulk\.[\w.:]*shared::c\w+\.global")
_READS = re.compile(r"\bld\.shared|\bldmatrix")
_WRITES = re.compile(r"\b(?:st|atom|red)\.shared|\bstmatrix|\bcp\.async\.c[ag]\.|\bmbarrier\.init")
_WORD = re.compile(r"\[[a-z]\w*\+\d+\]")
_FENCES = re.compile(r"fence\.proxy\.async")
# Announcing bytes tells nobody that there is room.
_TELLS = re.compile(r"\bmbarrier\.arrive\b(?!\.expect_tx)")

_MBARRIER = re.compile(r"(%\w+) = ttg\.local_alloc\b.*!ttg\.memdesc<\d+(?:x\d+)*xi64\b")
_PART_OF = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_NO_USE = re.compile(r"ttng\.init_barrier\b|ttng\.inval_barrier\b|ttg\.local_dealloc\b")


def idle_barriers(ttgir: str) -> list[str]:
    """Names of mbarriers, or rows of them, that are initialised at most."""
    found = {made[1]: {made[1]} for made in _MBARRIER.finditer(ttgir)}
    for line in ttgir.splitlines() if found else ():
        part, names = _PART_OF.search(line), set(re.findall(r"%\w+", line))
        for barrier, parts in list(found.items()):
            if part and part[2] in parts:
                parts.add(part[1])
            elif names & parts and not _MBARRIER.search(line) and not _NO_USE.search(line):
                del found[barrier]
    return list(found)


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


def unfenced_reads(ptx: str) -> list[str]:
    """Arrivals, and copies, that reads of a buffer of TMA may still be under way at.

    Along every path of a thread, by the reads since its last fence. An arrival at any barrier
    counts, because who waits there may arrive for the one who copies. Reads of other memory do not:
    memory begins again wherever threads write, and reads are of what begins last before them; words
    at places of their own, which threads write, are theirs. Where it cannot be told what is read,
    or copied to, the read counts.
    """
    if not _COPIES.search(ptx):
        return []
    code = Code(ptx)
    copies = [code.address(part) for part in code.statements if _COPIES.search(part)]
    writes = [code.address(part) for part in code.statements if _WRITES.search(part)]
    starts = sorted({at for at in (*copies, *writes) if at is not None})
    # Words at places of their own: what partitions are given.
    words = {
        at[0] for part in code.statements if _WRITES.search(part) and (at := _WORD.search(part))
    }

    def copied_to(part: str) -> bool:
        word = _WORD.search(part)
        if word is not None and word[0] in words:
            return False
        at = code.address(part)
        if at is None or None in copies:
            return True
        before = bisect.bisect_right(starts, at) - 1
        return before < 0 or starts[before] in copies

    # Of every statement: whether there may be reads under way before it.
    under_way, reached = [False] * len(code.statements), [False] * len(code.statements)
    waiting, found = [0], set()
    while waiting:
        place = waiting.pop()
        part, after = code.statements[place], under_way[place]
        reached[place] = True
        if _FENCES.match(part):
            after = False
        elif _READS.search(part):
            after = after or copied_to(part)
        elif after and (_TELLS.search(part) or _COPIES.search(part)):
            found.add(place)
        for following in code.following[place]:
            if not reached[following] or (after and not under_way[following]):
                under_way[following] |= after
                waiting.append(following)
    return [code.statements[place] for place in sorted(found)]
