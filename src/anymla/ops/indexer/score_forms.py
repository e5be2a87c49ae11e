"""How programs of Hopper's scores work, by sizes (docs/performance/indexer.md)."""

from __future__ import annotations

import dataclasses

# Tiles of a multiprocessor for which it pays to fill it.
_MANY_TILES, _MANY_TILES_OF_PAIRS = 16, 40


@dataclasses.dataclass(frozen=True)
class Form:
    """How programs work.

    Attributes:
        ahead: see ``gluon_sm90_consume``.
        programs: that fit a multiprocessor.
        registers: of a thread when the kernel begins, at most; 0 for an equal part of them all.
        consumer_registers: of a consumer's thread later on.
    """

    ahead: bool
    programs: int
    registers: int
    consumer_registers: int


AHEAD = Form(True, 1, 0, 232)
# Programs that have little to do leave room for the selector, which is launched early. The products
# of pairs need 90 registers from the beginning.
FEW_PAIRS = Form(False, 1, 96, 128)
SINGLE = Form(False, 2, 80, 104)
FEW_SINGLE = dataclasses.replace(SINGLE, programs=1)


def form_of(items: int, tiles: int, shared: bool, multiprocessors: int) -> Form:
    """How programs of ``items`` rows or, ``shared``, pairs over ``tiles`` tiles each work."""
    each = items * tiles / multiprocessors
    if shared:
        return AHEAD if each > _MANY_TILES_OF_PAIRS else FEW_PAIRS
    return SINGLE if each > _MANY_TILES else FEW_SINGLE
