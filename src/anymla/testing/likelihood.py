"""Log-probabilities of a text's own tokens, in a right run and with a lasting fault.

A passkey is either found or not. This measures more finely if a fault shows in a run's
log-probabilities of ordinary text. Both runs read the same tokens, so each is compared with itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anymla.runtime.llm import LLM
from anymla.runtime.request import Request
from anymla.testing.retrieval import FAULTS, Fault, Hidden

# Faults of a whole run; the other faults concern the page with the fact.
LASTING = tuple(fault for fault in FAULTS if fault.lasting)
_ID = "text"


@dataclasses.dataclass(frozen=True)
class Moved:
    """Change of the log-probabilities of a text's tokens; natural logarithms.

    Attributes:
        tokens: number of tokens that were predicted.
        nats: mean of their negative log-probabilities.
        lost: increase of that mean over the right run's.
        error: standard error of the increase, with tokens taken as independent.
        typical: mean absolute difference from the right run.
        largest: largest absolute difference from the right run.
    """

    tokens: int
    nats: float
    lost: float
    error: float
    typical: float
    largest: float

    @classmethod
    def between(cls, right: Tensor, other: Tensor) -> Moved:
        """Compare two runs of one text, float64 [T] each."""
        difference = right - other
        return cls(
            tokens=len(right),
            nats=-float(other.mean()),
            lost=float(difference.mean()),
            error=float(difference.std()) / len(right) ** 0.5,
            typical=float(difference.abs().mean()),
            largest=float(difference.abs().max()),
        )

    def __str__(self) -> str:
        return (
            f"{self.nats:.3f} nats a token, {self.lost:+.4f} (error {self.error:.4f}); "
            f"moved by {self.typical:.4f}, at most {self.largest:.2f}"
        )


def logprobs(llm: LLM, token_ids: Sequence[int], fault: Fault | None = None) -> Tensor:
    """Return the log-probability of each token given those before it, from the second on.

    Args:
        llm: model that reads the text.
        token_ids: token ids of the text.
        fault: fault out of LASTING, or None.
    """
    ids = tuple(token_ids)
    request = Request(_ID, ids, max_new_tokens=0, prompt_logprobs=True)
    engine = llm.engine([request])
    everything = Hidden(ids, digits="", place=0, question=0)
    with contextlib.nullcontext() if fault is None else fault.broken(engine, everything):
        done = engine.run([request])[0]
    assert done.prompt_logprobs is not None
    return torch.tensor(done.prompt_logprobs[1:], dtype=torch.float64)


def compare(
    llm: LLM,
    token_ids: Sequence[int],
    faults: Sequence[Fault] = LASTING,
    rounded: LLM | None = None,
) -> Iterator[tuple[str, Moved]]:
    """Compare the right run with one of every fault, and with another precision if given.

    Args:
        llm: model that reads the text.
        token_ids: token ids of the text.
        faults: faults out of LASTING.
        rounded: the same model in another dtype, as a yardstick.

    Yields:
        The name of the fault ("none", or the dtype of ``rounded``), and the change.
    """
    right = logprobs(llm, token_ids)
    yield "none", Moved.between(right, right)
    if rounded is not None:
        yield (
            str(rounded.model.dtype).removeprefix("torch."),
            Moved.between(right, logprobs(rounded, token_ids)),
        )
    for fault in faults:
        yield fault.name, Moved.between(right, logprobs(llm, token_ids, fault))
