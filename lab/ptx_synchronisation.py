"""Checks that a kernel's warps synchronise shared memory as they must, in PTX and in Gluon's IR.

A warp barrier must precede an arrival at an mbarrier by one thread for several warps. Triton lets
one thread of a partition arrive. Its arrival releases only what this thread can see, and it sees
accesses of the other warps only if they passed a barrier after their last access. Without this, the
order of barriers between partitions, which tests run on the host, means nothing.

Reads must be complete before TMA may write to the same place. A barrier orders reads and later
writes of threads, but not those of TMA: a read that was still in flight when a buffer was given
back has been seen to return data that were copied there next. A thread that has read such a buffer
executes fence.proxy.async before it signals anybody. Reads by the matrix unit have been waited for.

Every mbarrier that is initialised must be used. Triton reuses the memory of one that is not, and an
initialisation takes another path than a store: it has been seen to overwrite data that were stored
there after it.
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
# No branch leads to the labels that mark lines of the source.
_LABEL = re.compile(r"^\$L(?!__tmp)")

_COPIES = re.compile(r"\bcp\.async\.bulk\.[\w.:]*shared::c\w+\.global")
_READS = re.compile(r"\bld\.shared|\bldmatrix")
_WRITES = re.compile(r"\b(?:st|atom|red)\.shared|\bstmatrix|\bcp\.async\.c[ag]\.|\bmbarrier\.init")
_WORD = re.compile(r"\[[a-z]\w*\+\d+\]")
_FENCES = re.compile(r"fence\.proxy\.async")
# An arrival that only announces bytes does not signal that a buffer is free.
_TELLS = re.compile(r"\bmbarrier\.arrive\b(?!\.expect_tx)")

_MBARRIER = re.compile(r"(%\w+) = ttg\.local_alloc\b.*!ttg\.memdesc<\d+(?:x\d+)*xi64\b")
_PART_OF = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_NO_USE = re.compile(r"ttng\.init_barrier\b|ttng\.inval_barrier\b|ttg\.local_dealloc\b")


def idle_barriers(ttgir: str) -> list[str]:
    """List mbarriers, or rows of them, that are initialised but not used."""
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
    """List arrivals by one thread after an access of shared memory, or a label, without a barrier.

    Arrivals that announce bytes, and those that a kernel writes itself, are ignored.
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
    """List arrivals and copies that may happen while reads of a TMA buffer are in flight.

    Every path of a thread is followed, with the reads since its last fence. An arrival at any
    barrier counts, because a thread that waits there may arrive for the one that copies. Reads of
    other memory do not count: memory begins anew wherever threads write, and a read belongs to the
    last memory that begins before it; separate words that threads write belong to the threads. If
    the text does not determine what is read or copied to, the read counts.
    """
    if not _COPIES.search(ptx):
        return []
    code = Code(ptx)
    copies = [code.address(part) for part in code.statements if _COPIES.search(part)]
    writes = [code.address(part) for part in code.statements if _WRITES.search(part)]
    starts = sorted({at for at in (*copies, *writes) if at is not None})
    # Separate words hold the arguments of partitions.
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

    # For every statement, True if reads may be in flight before it.
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
