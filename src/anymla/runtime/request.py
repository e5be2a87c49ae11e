"""A request, its state while it runs, and what comes out."""

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
    """What a user asks for.

    Attributes:
        request_id: unique among the requests that an engine holds.
        token_ids: the prompt.
        max_new_tokens: tokens to generate at most; 0 only together with ``prompt_logprobs``.
        sampling: how they are chosen.
        stop_ids: generation ends after any of these.
        prompt_logprobs: also compute the log-probability of every prompt token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int = 16
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs: bool = False

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.token_ids) + self.max_new_tokens

    @property
    def max_written(self) -> int:
        """Tokens that can reach the caches: the last one generated is never run."""
        return self.max_length - 1 if self.max_new_tokens else self.max_length


@dataclasses.dataclass
class Timings:
    """Seconds on a monotonic clock; 0 where it has not happened."""

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
    """What a finished request produced.

    Attributes:
        request: as submitted.
        token_ids: the tokens generated, a stop token included.
        finish_reason: "stop" after a stop token, else "length".
        logprobs: of the generated tokens, before temperature and top-p.
        prompt_logprobs: one for each prompt token, None for the first; None if not asked for.
        drafted: draft tokens that were verified.
        accepted: those that were right.
        timings: of the request.
        cached: leading tokens of the prompt whose cache rows were there already.
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
        """The same with its first tokens only, as it ends where its text does: with "stop"."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason="stop",
        )


class RequestState:
    """A request between submission and completion.

    Attributes:
        request: as submitted.
        tokens: prompt and generated tokens; all of them are final.
        computed: leading tokens whose cache rows are final. While generating, this is all but the
            newest token.
        drafts: guesses at the tokens after ``tokens``, not yet verified.
        row: row in the block tables, -1 before admission.
        cached: leading tokens whose cache rows were there at admission.
        kept_at: a length that a later request can go on behind, if the caches are kept; else None.
        logprobs: of the generated tokens.
        prompt_logprobs: of the prompt tokens after the first, as far as computed.
        finish_reason: None until finished.
        counts: how often each token has come, for penalties; made with the first logits.
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
        """Whether prompt tokens remain to be computed."""
        return self.computed < self.prompt_length

    @property
    def drafted_from(self) -> int:
        """First position that drafts can be made for, now or by a request that goes on here."""
        return self.prompt_length if self.kept_at is None else self.kept_at

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    def penalised(self, logits: Tensor, drafts: Sequence[int] = ()) -> Tensor:
        """Logits less the penalties that the request asks for; see ``TokenCounts.penalised``.

        Args:
            logits: float [n, V] of consecutive positions.
            drafts: ids behind the tokens, n - 1 at least.
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
        """Take the target's choices for consecutive positions, as far as the drafts were right.

        Args:
            chosen: the token after ``tokens``, then the one after each draft.
            logprobs: theirs.

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
        """The result of a finished request."""
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
    """How many tokens to generate where nobody has said it: fewer where the context ends before.

    Args:
        wanted: tokens, where there is room for them.
        prompt_length: tokens of the prompt.
        config: the model's configuration.
    """
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
