"""Log-probabilities of a text's own tokens, right and with one thing broken throughout.

A passkey is found or not; here is the finer question, whether a fault can be seen in what a run
says of ordinary text. Both runs read the same tokens, so that each is compared with itself.
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

# Faults of a whole run; the others are of the page in which a fact stands.
LASTING = tuple(fault for fault in FAULTS if fault.lasting)
_ID = "text"


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far the log-probabilities of a text's tokens moved; natural logarithms.

    Attributes:
        tokens: how many were predicted.
        nats: mean of their negative log-probabilities.
        lost: how much larger that is than of the right run.
        error: standard error of it, tokens taken as independent.
        typical: mean distance from the right run.
        largest: largest distance.
    """

    tokens: int
    nats: float
    lost: float
    error: float
    typical: float
    largest: float

    @classmethod
    def between(cls, right: Tensor, other: Tensor) -> Moved:
        """Of two runs of one text, float64 [T] each."""
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
    """Log-probability of each token after the first, given those before it; float64 [T - 1].

    Args:
        llm: the model.
        token_ids: of the text.
        fault: one of LASTING, or None.
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
    """The right run, if asked the same in another precision, and one of every fault.

    Args:
        llm: the model.
        token_ids: of the text.
        faults: of LASTING.
        rounded: the same model in another dtype: a yardstick.

    Yields:
        what is broken ("none", or the dtype of ``rounded``), and how far that moves the text.
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
