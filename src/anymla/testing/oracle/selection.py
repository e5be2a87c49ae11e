"""Judgement of selections by score, which tolerates near-ties and nothing else."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class Selections:
    """Findings over all selections that were checked.

    Attributes:
        checked: number of rows checked.
        swapped: number of rows whose set differs from the oracle's, within the bound.
        worst: largest (best unchosen - worst chosen score) / bound over those rows.
        violations: one line each for rows that are wrong.
    """

    checked: int = 0
    swapped: int = 0
    worst: float = 0.0
    violations: list[str] = dataclasses.field(default_factory=list)

    def judge(
        self, scores: Tensor, visible: Tensor, chosen: Tensor, k: int, bound: Tensor, where: str
    ) -> None:
        """Check that each row chose its top-k visible candidates, each once.

        Args:
            scores: float64 [n, E], scores of the candidates.
            visible: bool [n, E], mask of visible candidates.
            chosen: int64 [n, K] choices, valid ones first, then -1.
            k: number of candidates to choose (fewer if fewer are visible).
            bound: float64 [n], largest distance of the run's scores from the oracle's.
            where: name of the rows in messages: "layer 2 topk, position 17" for ``where`` "layer 2
                topk" and row 17.
        """
        n, candidates = scores.shape
        self.checked += n
        count = visible.sum(1).clamp(max=k)
        valid = (chosen >= 0) & (chosen < candidates)
        prefix = torch.arange(chosen.shape[1]) < count.unsqueeze(1)
        exact = ((chosen >= 0) == prefix).all(1) & (valid | (chosen == -1)).all(1)
        # A spare last column receives the invalid choices.
        picked = torch.zeros(n, candidates + 1, dtype=torch.bool)
        picked.scatter_(1, torch.where(valid, chosen, candidates), True)
        picked = picked[:, :candidates]
        distinct = picked.sum(1) == valid.sum(1)
        seen = ~(picked & ~visible).any(1)
        # The spare column again: without any candidates, nothing is compared.
        spare = scores.new_full((n, 1), torch.inf)
        worst_chosen = torch.cat((torch.where(picked, scores, torch.inf), spare), 1).amin(1)
        left = torch.where(visible & ~picked, scores, -torch.inf)
        best_left = torch.cat((left, -spare), 1).amax(1)
        gap = best_left - worst_chosen
        swapped = exact & distinct & seen & (gap > 0)
        self.swapped += int(swapped.sum())
        if swapped.any():
            self.worst = max(self.worst, float((gap / bound)[swapped].max()))
        for fault, rows in (
            ("count or order of valid entries", ~exact),
            ("an entry chosen twice", ~distinct),
            ("an invisible entry chosen", ~seen),
            ("a better entry left out", swapped & (gap > bound)),
        ):
            self.violations += [
                f"{where}, row {row}: {fault}" for row in rows.nonzero().flatten().tolist()
            ]


def best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the top-k visible candidates [n, k], best first, -1 where there are fewer.

    NaN comes before +inf, and among equal scores (0 and -0 are equal, as are NaNs) the lower
    candidate comes first; a visible -inf is a score like any other.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    # A stable sort puts NaN first; visible candidates keep their order before the others.
    hidden = ~visible.gather(1, order)
    last = hidden.to(torch.uint8).sort(dim=1, stable=True).indices
    order, hidden = order.gather(1, last), hidden.gather(1, last)
    chosen = order.masked_fill(hidden, -1)[:, :k]
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)
