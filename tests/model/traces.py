"""What a run of a model computed for one sequence, and how two such runs compare."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.testing.tolerance import relative_error


@dataclasses.dataclass(frozen=True)
class Trace:
    """What each layer gave for T tokens, and what it chose.

    Attributes:
        attention: [T, hidden] a layer.
        ffn: [T, hidden] a layer.
        streams: [T, N, hidden] a layer.
        logits: [T, vocab].
        entries: by layer with an indexer, the compressed entries that each token attends to.
        experts: by layer, the experts of each token.
    """

    attention: list[Tensor]
    ffn: list[Tensor]
    streams: list[Tensor]
    logits: Tensor
    entries: dict[int, list[set[int]]]
    experts: dict[int, list[set[int]]]

    def __len__(self) -> int:
        return len(self.logits)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the choices of a run were made from.

    Attributes:
        entries: by layer with an indexer, [T, entries]; column w counts for a token at position p
            only if w < (p + 1) // ratio and it is not -inf.
        experts: by layer that routes by score, [T, E], bias included.
        ratios: by layer with an indexer, tokens of an entry; 4 for those that are not there.
    """

    entries: dict[int, Tensor]
    experts: dict[int, Tensor]
    ratios: dict[int, int] = dataclasses.field(default_factory=dict)


def layer_errors(got: Trace, want: Trace) -> dict[str, float]:
    """Largest difference of every layer's outputs, relative to the largest output of that layer."""
    errors = {}
    for name in ("attention", "ffn", "streams"):
        pairs = zip(getattr(got, name), getattr(want, name), strict=True)
        for layer, (a, b) in enumerate(pairs):
            errors[f"{name} of layer {layer}"] = relative_error(a, b)
    return errors


def narrowest_choice(trace: Trace, scores: Scores) -> float:
    """Smallest gap between a chosen and a rejected score, relative to the row's largest score."""
    gaps = [float("inf")]
    for kind in ("entries", "experts"):
        for layer, rows in getattr(scores, kind).items():
            for token, chosen in enumerate(getattr(trace, kind)[layer]):
                row = rows[token].double()
                if kind == "entries":
                    row = row[: (token + 1) // scores.ratios.get(layer, 4)]
                    row = row[row > -torch.inf]
                if len(chosen) < len(row):
                    best = row.sort(descending=True).values
                    gap = best[len(chosen) - 1] - best[len(chosen)]
                    gaps.append(float(gap / row.abs().max()))
    return min(gaps)


def differing_choices(got: Trace, want: Trace, scores: Scores, noise: float) -> list[str]:
    """Every token for which the runs chose differently, and whether scores explain it.

    Args:
        got: one run.
        want: the run that ``scores`` belong to.
        scores: of the second run.
        noise: difference of two scores, relative to the row's largest, that rounding may turn over.
    """
    found = []
    for kind in ("entries", "experts"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        assert ours.keys() == theirs.keys(), f"{kind}: layers {ours.keys()}, {theirs.keys()}"
        for layer in ours:
            for token, (a, b) in enumerate(zip(ours[layer], theirs[layer], strict=True)):
                if a == b:
                    continue
                where = f"{kind} of layer {layer}, token {token}"
                ranked = getattr(scores, kind).get(layer)
                if len(a) != len(b) or ranked is None:
                    found.append(f"{where}: {sorted(a)}, expected {sorted(b)}")
                    continue
                row = ranked[token].double()
                gap = max(float(row[list(b - a)].max() - row[list(a - b)].min()), 0.0)
                tie = gap <= noise * float(row[row.isfinite()].abs().max())
                meaning = "a near-tie: take another seed" if tie else f"scores {gap:.3g} apart"
                found.append(f"{where}: {sorted(a - b)} for {sorted(b - a)}, {meaning}")
    return found
