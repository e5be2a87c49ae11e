"""Requirements of the lab's commands beyond those of ``python -m lab`` itself."""

from __future__ import annotations

from anymla.cli.bad_input import BadInput
from lab.peers import Peer


def require_peer(option: str, peer: Peer) -> None:
    """Raise BadInput where a peer that was asked for is not here."""
    support = peer.available()
    if not support:
        raise BadInput(f"{option}: {support.reason}")
