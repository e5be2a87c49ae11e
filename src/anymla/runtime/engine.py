"""The engine: runs requests one step at a time on one device."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from anymla.model.transformer import Transformer
from anymla.ops.compile_notice import NOTICE
from anymla.ops.compile_watch import WATCH
from anymla.ops.registry import skip_checks
from anymla.ops.streams import Workspace
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.decode_runner import DecodeRunner, Launched, decode_mode, decode_runner
from anymla.runtime.draft_width import DraftWidth
from anymla.runtime.dspark_drafts import DSparkDrafter
from anymla.runtime.dspark_step import DraftBlocks
from anymla.runtime.engine_memory import require_engine_memory
from anymla.runtime.forwarded import Forwarded
from anymla.runtime.next_tokens import choose_next, score_prompts
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, Request, RequestState, check_request
from anymla.runtime.scheduler import Scheduler
from anymla.runtime.sizing import (
    cache_format,
    drafts_blocks,
    options_for,
    pool_sizes,
    running_specs,
)
from anymla.runtime.span import Span, decode_span
from anymla.runtime.speculation import Drafter, MtpDrafter
from anymla.runtime.step_plan import StepPlanner
from anymla.runtime.warm_up import WarmUp
from anymla.runtime.workspaces import attends_to_workspaces


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Outcome of one step.

    Attributes:
        prompt_tokens: number of prompt tokens computed.
        new_tokens: tokens generated, in order, by request id.
        finished: completions of the requests that ended.
    """

    prompt_tokens: int
    new_tokens: dict[str, list[int]]
    finished: list[Completion]


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """A step that was launched before the tokens of the step before it were known.

    Attributes:
        states: requests of the step, some of which may have ended since.
        launched: the step that was launched.
    """

    states: list[RequestState]
    launched: Launched

    def unfinished(self) -> list[int]:
        """Return the indices of the requests that go on."""
        return [place for place, state in enumerate(self.states) if state.finish_reason is None]


class Engine:
    """Runs a model for requests that join and leave between steps.

    A request's tokens do not depend on its neighbours, on how its prompt is split, or on
    speculation, as far as the model's arithmetic does not: see ``anymla.runtime.sampler``.

    Attributes:
        model: network that is run.
        options: sizes of the engine.
        store: caches, page pools and block tables.
        scheduler: scheduler of waiting and running requests.
        workspace: scratch memory of the operations.
        on_finish: callback with the engine and the state of a request that ended, called while the
            request's pages still hold its rows.
    """

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions,
        *,
        on_finish: Callable[[Engine, RequestState], None] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """Allocate the caches.

        Args:
            model: network that is run.
            options: sizes of the engine.
            on_finish: callback for requests that end; see the attribute.
            workspace: scratch memory, which may be shared with other work on the same stream; None
                to allocate one.

        Raises:
            ValueError: options that the model does not allow.
            NotEnoughMemory: sizes that the machine has no memory for; nothing has been taken.
        """
        self.model = model
        self.options = options
        self.on_finish = on_finish
        self.workspace = Workspace(model.device) if workspace is None else workspace
        specs = running_specs(model, options)
        groups = cache_groups(specs)
        formats, pages = cache_format(options), pool_sizes(groups, options)
        ngrams = NgramReader(model.engrams, model.device)
        self._require_memory = functools.partial(
            require_engine_memory,
            model.config,
            specs,
            groups,
            formats,
            pages,
            options,
            dtype=model.dtype,
            device=model.device,
            ngram_bytes=ngrams.token_bytes,
            ngram_buffers=decode_mode(options, model.device) != "plain",
        )
        self._require_memory()
        self.store = CacheStore(
            groups,
            specs,
            formats,
            pages,
            max_requests=options.max_requests,
            max_seq_len=options.max_seq_len,
            device=model.device,
        )
        self.scheduler = Scheduler(self.store, options)
        self._planner = StepPlanner(
            self.store,
            backend=model.backend,
            chunks=attends_to_workspaces(model),
            ngrams=ngrams,
        )
        self._blocks: DraftBlocks | None = None
        if drafts_blocks(specs):
            self._blocks = DraftBlocks(model, self.store, options)
        self._runner = decode_runner(model, self.store, options, self._blocks)
        self._states: dict[str, RequestState] = {}
        self._ahead: _Ahead | None = None
        # (tokens, requests) of steps whose tensors the operations have checked already.
        self._checked_sizes: set[tuple[int, int]] = set()
        self._backbone_layers = model.config.num_hidden_layers
        self._drafter: Drafter | None = None
        self._width: DraftWidth | None = None
        if options.adapt_drafts and options.draft_tokens:
            self._width = DraftWidth(options.draft_tokens, model.ranks, model.device)
        if self._blocks is not None:
            self._drafter = DSparkDrafter(
                model,
                self._planner,
                self._blocks,
                runner=self._runner,
            )
        elif options.draft_tokens:
            self._drafter = MtpDrafter(
                model,
                self._planner,
                self.store.layers[self._backbone_layers],
                window=specs[self._backbone_layers].window,
                draft_tokens=options.draft_tokens,
                runner=self._runner,
            )

    @classmethod
    def for_requests(
        cls,
        model: Transformer,
        options: EngineOptions,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[Engine, RequestState], None] | None = None,
    ) -> Engine:
        """Build an engine with just the pages that the given requests need; see ``options_for``.

        Raises:
            ValueError: there is no request, or ``check_request`` refuses one.
        """
        if not requests:
            raise ValueError("no request to size an engine for")
        for request in requests:
            check_request(request, model.config)
        sized = options_for(model, options, requests)
        return cls(model, sized, on_finish=on_finish)

    @property
    def busy(self) -> bool:
        """True if a request is waiting or running."""
        return bool(self._states)

    def state(self, request_id: str) -> RequestState:
        """Return the state of a request that has not finished."""
        return self._states[request_id]

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next step that has room.

        Raises:
            ValueError: the request is malformed, longer than the model or the engine allows, or can
                never fit in the page pools, or its id is in use.
        """
        check_request(request, self.model.config)
        if request.max_length > self.options.max_seq_len:
            raise ValueError(
                f"request {request.request_id!r}: its {request.max_length} tokens exceed the "
                f"engine's max_seq_len of {self.options.max_seq_len}"
            )
        if request.request_id in self._states:
            raise ValueError(f"request {request.request_id!r}: this id is in use")
        state = RequestState(request)
        self.scheduler.submit(state)
        self._states[request.request_id] = state

    @torch.inference_mode()
    def warm_up(self, only: Callable[[Bucket], bool] | None = None) -> None:
        """Run every size of step that serving meets, and record the graphs.

        Without it, the first step of each size takes this time: seconds for each kernel that has
        not been compiled before. Afterwards nothing is compiled, and no step needs more memory than
        was allocated here.

        Args:
            only: predicate for the decode buckets to prepare; if given, nothing else is prepared,
                not even prompts. None prepares all sizes.
        """
        with WATCH.paused():
            self._warm_up(only)
        WATCH.begin()

    def _warm_up(self, only: Callable[[Bucket], bool] | None) -> None:
        self._require_memory(padded=True)
        runner = self._runner
        buckets = [] if runner is None else [b for b in runner.buckets if only is None or only(b)]
        with self.workspace.active():
            warm_up = WarmUp(self.model, self._planner, self.options, self._blocks)
            if only is None:
                warm_up.run()
            else:
                warm_up.compile_decode(buckets)
            if runner is not None:
                runner.rehearse(buckets)
            self.workspace.reserve()
            if runner is not None:
                runner.prepare(buckets)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Run one batch of tokens; the report is empty if no request is left."""
        begin = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        rows = [] if ahead is None else ahead.unfinished()
        if rows:
            assert ahead is not None
            spans, launched = [decode_span(ahead.states[row]) for row in rows], ahead.launched
        else:
            spans, launched = self.scheduler.next_spans(), None
            rows = list(range(len(spans)))
        if not spans:
            assert not self._states, "requests wait, but none runs"
            return StepReport(0, {}, [])
        sizes = sum(len(span.token_ids) for span in spans), len(spans)
        with self.workspace.active(), skip_checks(sizes in self._checked_sizes):
            runner = self._runner
            if launched is None and runner is not None:
                launched = runner.launch(spans)
            if runner is None or launched is None:
                forwarded = self._forward(spans)
            else:
                self._ahead = self._launch_ahead(runner, spans, launched)
                forwarded = runner.collect(launched, rows)
            score_prompts(self.model, spans, forwarded)
            new_tokens = choose_next(self.model, spans, forwarded)
            if self._drafter is not None:
                self._drafter.run(spans, forwarded)
            if self._width is not None:
                self._adapt(self._width, spans, new_tokens, begin)
        self._checked_sizes.add(sizes)
        NOTICE.close()
        finished = []
        for span in spans:
            if span.state.finish_reason is None:
                self.store.slide(span.state)
            else:
                finished.append(self._finish(span.state))
        prompt_tokens = sum(len(span.token_ids) for span in spans if not span.is_decode)
        return StepReport(prompt_tokens, new_tokens, finished)

    def run(
        self,
        requests: Iterable[Request] = (),
        *,
        on_token: Callable[[str, int], None] | None = None,
    ) -> list[Completion]:
        """Submit requests and step until none is left.

        Args:
            requests: further requests to submit first.
            on_token: callback with request id and token, called as tokens are generated.

        Returns:
            Completions in the order of submission.
        """
        for request in requests:
            self.submit(request)
        order = {request_id: place for place, request_id in enumerate(self._states)}
        completions: list[Completion] = []
        while self.busy:
            report = self.step()
            completions += report.finished
            if on_token is not None:
                for request_id, tokens in report.new_tokens.items():
                    for token in tokens:
                        on_token(request_id, token)
        return sorted(completions, key=lambda done: order[done.request.request_id])

    def cancel(self, request_id: str) -> Completion:
        """End a request between steps, free its pages, and leave other requests alone.

        Returns:
            The tokens generated so far, with "stop" as the reason.

        Raises:
            KeyError: no such request is waiting or running.
        """
        state = self._states[request_id]
        state.finish_reason = "stop"
        return self._finish(state)

    def _launch_ahead(
        self, runner: DecodeRunner, spans: Sequence[Span], launched: Launched
    ) -> _Ahead | None:
        """Launch the next step if the last one's tokens alone determine it."""
        states = [span.state for span in spans]
        goes_on = any(state.remaining > 1 for state in states)
        if not goes_on or self.scheduler.running != states or self.scheduler.can_admit():
            return None
        following = runner.launch_next(launched, spans)
        return None if following is None else _Ahead(states, following)

    def _forward(self, spans: Sequence[Span]) -> Forwarded:
        taps, first_taps = (None, []) if self._drafter is None else self._drafter.taps(spans)
        step = self._planner.build(spans)
        caches = self.store.layers[: self._backbone_layers]
        hidden = self.model.forward(step, caches, taps=taps)
        return Forwarded.packed(hidden, spans, None if taps is None else taps.out, first_taps)

    def _adapt(
        self,
        width: DraftWidth,
        spans: Sequence[Span],
        new_tokens: Mapping[str, list[int]],
        begin: float,
    ) -> None:
        """Record the last step, and cut the drafts of the next one."""
        verified = []
        for span in spans:
            if span.is_decode:
                drafts = span.token_ids[1:]
                right = zip(drafts, new_tokens[span.state.request.request_id], strict=False)
                verified.append((len(drafts), sum(draft == token for draft, token in right)))
        alone = len(verified) == len(spans)
        width.observe(len(spans), verified, time.perf_counter() - begin if alone else None)
        drafted = [span.state for span in spans if span.state.drafts]
        if drafted:
            most = width.next(len(drafted))
            for state in drafted:
                del state.drafts[most:]

    def _finish(self, state: RequestState) -> Completion:
        state.timings.finished = time.perf_counter()
        if self.on_finish is not None:
            self.on_finish(self, state)
        self.scheduler.finish(state)
        del self._states[state.request.request_id]
        return state.completion()
