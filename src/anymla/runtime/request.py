"""A request, its state while it runs, and its result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from anymla.model.config import ModelConfig
from anymla.runtime.penalties import TokenCounts
from anymla.runtime.sampler import Sampling

GREEDY = Sampling()
FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request.

    Attributes:
        request_id: name that is unique among the requests that an engine holds.
        token_ids: token ids of the prompt.
        max_new_tokens: most tokens to generate; 0 only together with ``prompt_logprobs``.
        sampling: rule by which tokens are chosen from logits.
        stop_ids: token ids, after any of which generation ends.
        prompt_logprobs: True to compute the log-probability of every prompt token as well.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int = 16
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs: bool = False

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output together."""
        return len(self.token_ids) + self.max_new_tokens

    @property
    def max_written(self) -> int:
        """Most tokens that can reach the caches: the last generated one is never run."""
        return self.max_length - 1 if self.max_new_tokens else self.max_length


@dataclasses.dataclass
class Timings:
    """Times in seconds on a monotonic clock; 0 for events that have not happened."""

    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Durations in seconds: waiting, prefill (to the first token), decode, total."""
        prefilled = self.first_token or self.finished
        return {
            "waiting_s": self.started - self.submitted,
            "prefill_s": prefilled - self.started,
            "decode_s": self.finished - prefilled,
            "total_s": self.finished - self.submitted,
        }


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of a finished request.

    Attributes:
        request: request as it was submitted.
        token_ids: generated tokens, a stop token included.
        finish_reason: "stop" after a stop token, else "length".
        logprobs: natural log-probabilities of the generated tokens, before temperature and top-p.
        prompt_logprobs: one for each prompt token, None for the first; None if the request did not
            ask.
        drafted: number of draft tokens that were verified.
        accepted: number of draft tokens that were right.
        timings: times of the request's events.
        cached: number of leading prompt tokens whose cache rows existed already.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float | None, ...] | None
    drafted: int
    accepted: int
    timings: Timings
    cached: int = 0

    def cut(self, count: int) -> Completion:
        """Return the completion cut to its first tokens, with "stop" as the reason."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason="stop",
        )


class RequestState:
    """A request between submission and completion.

    Attributes:
        request: request as it was submitted.
        tokens: prompt and generated tokens, all of them final.
        computed: number of leading tokens whose cache rows are final; during generation all tokens
            but the newest.
        drafts: guesses of the tokens after ``tokens``, not yet verified.
        row: row in the block tables, -1 before admission.
        cached: number of leading tokens whose cache rows existed at admission.
        kept_at: length after which a later request can continue, if the caches are kept; else None.
        logprobs: natural log-probabilities of the generated tokens.
        prompt_logprobs: natural log-probabilities of the prompt tokens after the first, as far as
            computed.
        finish_reason: "stop" or "length"; None until finished.
        counts: occurrences of each token, for penalties; created with the first logits.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.token_ids)
        self.computed = 0
        self.drafts: list[int] = []
        self.row = -1
        self.cached = 0
        self.kept_at: int | None = None
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.counts: TokenCounts | None = None
        self.drafted = 0
        self.accepted = 0
        self.timings = Timings(submitted=time.perf_counter())

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.token_ids)

    @property
    def is_prefill(self) -> bool:
        """True if prompt tokens remain to be computed."""
        return self.computed < self.prompt_length

    @property
    def drafted_from(self) -> int:
        """First position that drafts can be made for, by this request or its continuation."""
        return self.prompt_length if self.kept_at is None else self.kept_at

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    def penalised(self, logits: Tensor, drafts: Sequence[int] = ()) -> Tensor:
        """Subtract the request's penalties from logits; see ``TokenCounts.penalised``.

        Args:
            logits: float [n, V] of consecutive positions.
            drafts: draft token ids after the tokens, n - 1 at least.
        """
        sampling = self.request.sampling
        if not sampling.is_penalised:
            return logits
        if self.counts is None:
            self.counts = TokenCounts(self.request.token_ids, logits.shape[-1], logits.device)
        return self.counts.penalised(logits, sampling, self.generated, drafts)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_length - len(self.tokens)

    def accept(self, chosen: list[int], logprobs: list[float]) -> list[int]:
        """Accept the target's choices for consecutive positions, as far as the drafts were right.

        Args:
            chosen: token after ``tokens``, then the token after each draft.
            logprobs: log-probabilities of the chosen tokens.

        Returns:
            The tokens appended: the right drafts and one token more, cut after a stop token.
        """
        accepted: list[int] = []
        for place, token in enumerate(chosen):
            accepted.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
                break
            if place < len(self.drafts) and self.drafts[place] != token:
                break
        self.drafted += len(self.drafts)
        matches = zip(accepted, self.drafts, strict=False)
        self.accepted += sum(token == draft for token, draft in matches)
        self.drafts = []
        self.tokens += accepted
        self.logprobs += logprobs[: len(accepted)]
        if self.finish_reason is None and not self.remaining:
            self.finish_reason = "length"
        if not self.timings.first_token:
            self.timings.first_token = time.perf_counter()
        return accepted

    def completion(self) -> Completion:
        """Return the result of a finished request."""
        assert self.finish_reason is not None
        scored = (None, *self.prompt_logprobs) if self.request.prompt_logprobs else None
        return Completion(
            request=self.request,
            token_ids=tuple(self.generated),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=scored,
            drafted=self.drafted,
            accepted=self.accepted,
            timings=self.timings,
            cached=self.cached,
        )


def default_new_tokens(wanted: int, prompt_length: int, config: ModelConfig) -> int:
    """Return the tokens to generate by default, fewer if the context ends before."""
    return max(1, min(wanted, config.max_position_embeddings - prompt_length))


def check_request(request: Request, config: ModelConfig) -> None:
    """Raise ValueError, in one line, unless the model can run the request."""
    name = f"request {request.request_id!r}"
    length, new, limit = (
        len(request.token_ids),
        request.max_new_tokens,
        config.max_position_embeddings,
    )
    if not length:
        raise ValueError(f"{name}: the prompt is empty")
    for token in request.token_ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"{name}: unknown token id {token}, the vocabulary has {config.vocab_size}"
            )
        if token in config.image_token_ids:
            raise ValueError(
                f"{name}: token id {token} stands for an image (image_token_id), and images are "
                "not read"
            )
    if new < 0 or (new == 0 and not request.prompt_logprobs):
        raise ValueError(f"{name}: max_new_tokens must be at least 1, got {new}")
    if length > limit:
        raise ValueError(
            f"{name}: the prompt has {length} tokens, max_position_embeddings is {limit}"
        )
    if length + new > limit:
        raise ValueError(
            f"{name}: {length} prompt tokens and {new} new ones exceed "
            f"max_position_embeddings of {limit}"
        )
