"""The sample of an audited step: its tokens, what was recorded of them, and the cases they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anymla.audit.auditor import Auditor
from anymla.audit.packet import Held, Packet
from anymla.audit.rows import RowRecorder

HEAD = "head"  # section of the recorder for what follows the last layer
_HEADS = 16  # heads of attention, and of an index query, that are judged: it bounds a case's size


@dataclasses.dataclass
class Sample:
    """The tokens of a step that are looked at.

    Attributes:
        auditor: auditor that gets the cases; its seed decides every choice.
        recorder: recorder of the methods' tensors.
        positions: position of every token in its request, padding left out.
        owners: index of the request of each token.
        names: names of the requests.
        layers: prefixes of the layers that are looked at.
        chosen: indices of tokens that are looked at by every method but the compressors.
        rows: ``chosen`` on the device.
        at: positions of the chosen tokens, on the device.
        of: requests of the chosen tokens, on the device.
        packet: tensors that leave the device together.
        sections: recorded tensors, by section and then by name.
        gathered: rows gathered from caches, by the method that needs them.
    """

    auditor: Auditor
    recorder: RowRecorder
    positions: np.ndarray
    owners: np.ndarray
    names: list[str]
    layers: set[str]
    chosen: list[int]
    rows: Tensor
    at: Tensor
    of: Tensor
    packet: Packet = dataclasses.field(default_factory=Packet)
    sections: dict[str, dict[str, Held]] = dataclasses.field(default_factory=dict)
    gathered: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    def name(self, token: int) -> str:
        """Return the name of a token's request."""
        owner = self.owner(token)
        return self.names[owner] if owner < len(self.names) else f"row {owner}"

    def position(self, token: int) -> int:
        """Return the position of a token in its request."""
        return int(self.positions[token])

    def owner(self, token: int) -> int:
        """Return the index of a token's request."""
        return int(self.owners[token])

    def pick(self, what: str, groups: Sequence[np.ndarray]) -> list[int]:
        """Pick tokens of groups; see ``pick``."""
        return pick(self.auditor, self.recorder.rows, what, groups)

    def heads(self, what: str, heads: int) -> tuple[int, int]:
        """Return the first head, and the number, of adjacent heads to judge."""
        count = min(heads, _HEADS)
        return self.auditor.random(what).randrange(heads - count + 1), count

    def recorded(self, section: str, *names: str) -> list[Held] | None:
        """Return recorded tensors by name, a row for each chosen token; None if any is missing."""
        found, count = self.sections.get(section, {}), len(self.chosen)
        if any(name not in found for name in names):
            return None
        return [found[name].narrow(0, 0, count) for name in names]

    def hold(self, **tensors: Tensor | None) -> dict[str, Held]:
        """Add tensors to the packet by name; None is left out."""
        return {n: self.packet.hold(each) for n, each in tensors.items() if each is not None}

    def rotary(self, attention: Any) -> dict[str, Held]:
        """Add the rows of a layer's rotary table at the chosen tokens' positions."""
        return self.hold(cos_sin=attention.rotary_emb.cos_sin_cache[self.at].float())

    def plan(
        self,
        method: str,
        layer: str,
        tensors: dict[str, Held],
        tokens: list[int] | None = None,
        **numbers: float | int | str,
    ) -> None:
        """Plan a case of a check, of the chosen tokens or of ``tokens``."""
        tokens = self.chosen if tokens is None else tokens
        names = [self.name(token) for token in tokens]
        places = [self.position(token) for token in tokens]
        self.packet.plan(method, layer, names, places, tensors, **numbers)


def pick(auditor: Auditor, most: int, what: str, groups: Sequence[np.ndarray]) -> list[int]:
    """Pick one token of as many groups as wanted; once all groups have one, further tokens.

    Args:
        auditor: auditor whose settings say how many tokens are enough.
        most: largest number of tokens, whatever the settings say.
        what: name of the choice, part of its seed.
        groups: indices of tokens.
    """
    numbers, count = auditor.random(what), min(auditor.settings.requests, most)
    groups = list(groups)
    numbers.shuffle(groups)
    picked: list[int] = []
    while len(picked) < count and any(len(group) for group in groups):
        for place, group in enumerate(groups):
            if len(group) and len(picked) < count:
                at = numbers.randrange(len(group))
                picked.append(int(group[at]))
                groups[place] = np.delete(group, at)
    return sorted(picked)


def on_device(device: torch.device, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Copy host values to a device as int64, without a wait."""
    pinned = device.type == "cuda"
    held = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return held.to(device, non_blocking=True) if pinned else held
