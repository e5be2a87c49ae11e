"""The interface that people know: ``LLM("directory").generate("text", max_new_tokens=20)``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from tqdm import tqdm

from anymla.model.config import ModelConfig
from anymla.model.drafts import Drafts
from anymla.model.generation import ChatTemplate, GenerationDefaults
from anymla.model.load import DTYPES, load_model
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, FinishReason, Request, default_new_tokens
from anymla.runtime.sampler import Sampling, sampling_of
from anymla.runtime.stop_text import StopText
from anymla.runtime.threads import threads_for, weights_per_token

Prompt: TypeAlias = "str | Sequence[int]"
_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Generation:
    """A text that was generated.

    Attributes:
        text: without the prompt, and without the stop string.
        token_ids: the tokens generated, a stop token included; of a stop string, up to the token
            that completes it.
        logprobs: of these tokens, before temperature and restrictions.
        finish_reason: "stop" after a stop token or string, else "length".
        prompt_token_ids: the prompt.
        drafted: draft tokens that were verified.
        accepted: those that were right.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    drafted: int
    accepted: int


@dataclasses.dataclass(frozen=True)
class _Asked:
    """How texts are generated, with the checkpoint's word for what the caller left open."""

    max_new_tokens: int
    is_length_given: bool
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: frozenset[int]


class LLM:
    """A checkpoint that generates text.

    Calls build an engine for their requests and give its memory back; a long-lived server drives
    ``anymla.runtime.engine.Engine``, or is vLLM (docs/serve.md).

    Attributes:
        model: the network.
        tokenizer: of the checkpoint.
        defaults: of its ``generation_config.json``.
        new_tokens: generated, at most, where neither caller nor ``generation_config.json`` says how
            many; 128 at first.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str = "bf16",
        kv_cache: str = "fp8",
        drafts: Drafts = "auto",
        draft_tokens: int | None = None,
        backend: str | None = None,
        chunk_size: int = 512,
        max_requests: int = 8,
        threads: int | None = None,
        progress: bool = False,
    ) -> None:
        """Load a checkpoint.

        Args:
            directory: with ``config.json``, ``tokenizer.json`` and safetensors, and if wanted
                ``generation_config.json`` and a chat template.
            device: where it runs; None for the accelerator if there is one, else the CPU.
            dtype: of activations, "bf16" or "fp32".
            kv_cache: of cache rows, as in ``EngineOptions``.
            drafts: with which drafter; "auto" for what the files hold, "off" for none. Drafts
                change no token.
            draft_tokens: guessed ahead; None for as many as the drafter is made for.
            backend: asked of every operation; None for the best.
            chunk_size: most prompt tokens of a request in one step.
            max_requests: requests that run at once.
            threads: of torch on a CPU; None for as many as the model's size pays for.
            progress: show a bar while loading.

        Raises:
            ValueError: unusable options, or a directory that is no checkpoint.
            NotEnoughMemory: the device has too little for it.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        place = torch.device(_best_device() if device is None else device)
        self.defaults = GenerationDefaults.from_dir(directory)
        self.tokenizer = Tokenizer.from_dir(directory)
        if place.type == "cpu":
            torch.set_num_threads(threads or threads_for(weights_per_token(Path(directory))))
        self.model = load_model(
            directory,
            dtype=DTYPES[dtype],
            device=place,
            backend=backend,
            drafts=drafts,
            progress=progress,
        )
        guessed = self.model.config.default_draft_tokens if draft_tokens is None else draft_tokens
        self._options = EngineOptions(
            kv_cache=kv_cache,
            chunk_size=chunk_size,
            max_requests=max_requests,
            draft_tokens=guessed,
        )
        self.new_tokens = _NEW_TOKENS
        if self.defaults.unapplied_line is not None:
            tqdm.write(self.defaults.unapplied_line, file=sys.stderr)
        self._directory = directory
        self._template: ChatTemplate | None = None

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's hyperparameters."""
        return self.model.config

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine of this model with room for these requests, which are not submitted yet."""
        return Engine.for_requests(self.model, self._options, requests)

    @overload
    def generate(self, prompts: str, **options: Any) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Generation]: ...

    def generate(
        self, prompts: str | Sequence[Prompt], **options: Any
    ) -> Generation | list[Generation]:
        """Continue a text, or many together.

        Args:
            prompts: a text; or several, each a text or its token ids.
            **options: ``max_new_tokens``, ``temperature`` (0 takes the best token), ``top_p``,
                ``top_k``, ``min_p``, ``repetition_penalty``, ``presence_penalty``,
                ``frequency_penalty``, ``seed``, ``stop`` (a string or several) and ``ignore_eos``.
                What is left out is as ``generation_config.json`` says; without it, the best token
                is taken and 128 tokens are generated, or as many as the context has room for.

        Returns:
            One result for one text, else a list in the order of the prompts. What else is in the
            list, and drafts, change a text by no more than the order in which sums are rounded.

        Raises:
            ValueError: a prompt that is empty or too long, or unusable options.
        """
        asked = self._asked(**options)
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [
            self._request(str(number), prompt, asked) for number, prompt in enumerate(several)
        ]
        if not requests:
            return []
        engine = self.engine(requests)
        for request in requests:
            engine.submit(request)
        texts = {request.request_id: _Text(self.tokenizer, asked) for request in requests}
        done: dict[str, Generation] = {}
        while engine.busy:
            report = engine.step()
            ended = {each.request.request_id: each for each in report.finished}
            for name, tokens in report.new_tokens.items():
                texts[name].read(tokens)
                if texts[name].stopped and name not in ended:
                    ended[name] = engine.cancel(name)
            done |= {name: texts[name].result(each) for name, each in ended.items()}
        results = [done[request.request_id] for request in requests]
        return results[0] if isinstance(prompts, str) else results

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Continue one text; yields it as it comes.

        Args:
            prompt: a text or its token ids.
            **options: as for ``generate``.
        """
        asked = self._asked(**options)
        request = self._request("0", prompt, asked)
        engine = self.engine([request])
        engine.submit(request)
        text = _Text(self.tokenizer, asked)
        while engine.busy and not text.stopped:
            for tokens in engine.step().new_tokens.values():
                if new := text.read(tokens):
                    yield new
        if rest := text.finish():
            yield rest

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a dialogue, written as the checkpoint's chat template says.

        Args:
            messages: each with "role" ("system", "user" or "assistant") and "content".
            **options: as for ``generate``.

        Raises:
            ConfigError: the checkpoint has no chat template, or it refuses the messages.
        """
        return self.generate([self.chat_prompt(messages)], **options)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a dialogue up to where the next answer begins; see ``chat``."""
        if self._template is None:
            self._template = ChatTemplate.from_dir(self._directory)
        text = self._template.render(messages)
        return self.tokenizer.encode(text, leading=False, most=self.config.max_position_embeddings)

    def _asked(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> _Asked:
        said = self.defaults
        sampling = sampling_of(
            said,
            seed,
            {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
            },
        )
        ends = frozenset(self.config.eos_token_ids) | frozenset(said.eos_token_ids)
        return _Asked(
            max_new_tokens=max_new_tokens
            if max_new_tokens is not None
            else said.max_new_tokens or self.new_tokens,
            is_length_given=max_new_tokens is not None,
            sampling=sampling,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=frozenset() if ignore_eos else ends,
        )

    def _request(self, name: str, prompt: Prompt, asked: _Asked) -> Request:
        if isinstance(prompt, str):
            most = self.config.max_position_embeddings
            prompt = self.tokenizer.encode(prompt, most=most) if prompt else ()
        return Request(
            name,
            tuple(prompt),
            max_new_tokens=asked.max_new_tokens
            if asked.is_length_given
            else default_new_tokens(asked.max_new_tokens, len(prompt), self.config),
            sampling=asked.sampling,
            stop_ids=asked.stop_ids,
        )


class _Text:
    """The text of a request while it runs."""

    def __init__(self, tokenizer: Tokenizer, asked: _Asked) -> None:
        self._text = StopText(tokenizer.stream(), asked.stop)
        self._parts: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    def read(self, tokens: Sequence[int]) -> str:
        new = "".join(map(self._text.push, tokens))
        self._parts.append(new)
        return new

    def finish(self) -> str:
        rest = self._text.finish()
        self._parts.append(rest)
        return rest

    def result(self, done: Completion) -> Generation:
        self.finish()
        if self.stopped:
            done = done.cut(self._text.tokens)
        return Generation(
            text="".join(self._parts),
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            finish_reason=done.finish_reason,
            prompt_token_ids=done.request.token_ids,
            drafted=done.drafted,
            accepted=done.accepted,
        )


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"
