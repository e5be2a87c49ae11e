"""The main interface: ``LLM("directory").generate("text", max_new_tokens=20)``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Unpack, overload

import numpy as np
import torch
from tqdm import tqdm

from anymla.model.chat import ChatFormat, ChatOptions, ChatText, chat_format
from anymla.model.config import ModelConfig
from anymla.model.drafts import Drafts
from anymla.model.generation import GenerationDefaults
from anymla.model.hub import local_checkpoint
from anymla.model.load import activation_dtype, load_model
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.devices import named_device
from anymla.runtime.dialogue import ChatAnswer, Dialogue
from anymla.runtime.engine import Engine
from anymla.runtime.generation import Generation
from anymla.runtime.generation_options import (
    GenerationOptions,
    checked_options,
    options_by_name,
)
from anymla.runtime.options import EngineOptions
from anymla.runtime.prompts import Array, Prompt, read_messages, read_prompts
from anymla.runtime.request import Completion, Request, check_request, default_new_tokens
from anymla.runtime.sampler import Sampling, sampling_of
from anymla.runtime.stop_text import StopText
from anymla.runtime.threads import threads_for, weights_per_token

__all__ = ["LLM", "Generation", "Prompt"]

Messages: TypeAlias = "str | Sequence[Mapping[str, Any]]"
_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Generation parameters, completed by the checkpoint's defaults."""

    max_new_tokens: int
    is_length_given: bool
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: frozenset[int]


class LLM:
    """A checkpoint that generates text.

    A call builds an engine for its requests and frees its memory at the end. A long-lived server
    drives ``anymla.runtime.engine.Engine``, or is vLLM (docs/serve.md).

    Attributes:
        model: network of the checkpoint.
        tokenizer: tokenizer of the checkpoint.
        defaults: values of its ``generation_config.json``.
        new_tokens: most tokens to generate if neither the caller nor ``generation_config.json``
            says how many; 128 at first.
    """

    @options_by_name
    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "bf16",
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
            model: a directory with ``config.json``, ``tokenizer.json`` and safetensors, and
                optionally ``generation_config.json`` and a chat template; or a checkpoint's name on
                the Hugging Face Hub, ``owner/name`` or ``owner/name@revision``, which is read from
                its cache or downloaded (with huggingface_hub installed).
            device: device to run on; None or "auto" for the accelerator if there is one, else the
                CPU.
            dtype: dtype of activations: "bf16" or "fp32", torch's dtypes and their names, or "auto"
                for the one of these two that ``config.json`` names.
            kv_cache: format of cache rows, as in ``EngineOptions``.
            drafts: drafter to use; "auto" for the one in the files, "off" for none. Drafts change
                no token.
            draft_tokens: number of tokens guessed ahead; None for the drafter's own number.
            backend: name of the backend of every operation; None for the best.
            chunk_size: most prompt tokens of a request in one step.
            max_requests: number of requests that run at once.
            threads: number of torch's CPU threads; None for as many as the model's size pays for.
            progress: True to show a bar while loading.

        Raises:
            TypeError: an unknown option; the message suggests the right name.
            ValueError: unusable options, a directory that is no checkpoint, or a name that neither
                exists here nor can be downloaded.
            NotEnoughMemory: the device has too little memory for the checkpoint.
        """
        place = named_device(device, "device")
        directory = local_checkpoint(model)
        dtype = activation_dtype(dtype, directory)
        self.defaults = GenerationDefaults.from_dir(directory)
        self.tokenizer = Tokenizer.from_dir(directory)
        if place.type == "cpu":
            torch.set_num_threads(threads or threads_for(weights_per_token(Path(directory))))
        self.model = load_model(
            directory,
            dtype=dtype,
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
        self._chat_format: ChatFormat | None = None

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's hyperparameters."""
        return self.model.config

    def engine(self, requests: Sequence[Request]) -> Engine:
        """Build an engine of this model with room for these requests, which are not submitted."""
        return Engine.for_requests(self.model, self._options, requests)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, **options: Unpack[GenerationOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompts: Sequence[int | np.integer[Any]], **options: Unpack[GenerationOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], **options: Unpack[GenerationOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompts: Array, **options: Unpack[GenerationOptions]
    ) -> Generation | list[Generation]: ...

    @options_by_name
    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerationOptions]
    ) -> Generation | list[Generation]:
        """Continue one text, or many together.

        Args:
            prompts: a text or its token ids; or several, each a text or its token ids. Ids are
                integers in a list, or an integer array or tensor: [T] for one prompt, or [prompts,
                T].
            **options: fields of ``GenerationOptions``.

        Returns:
            One result for one prompt, else a list in the order of the prompts. Neither other
            prompts nor drafts change a text, except through the order in which sums are rounded.

        Raises:
            TypeError: there is no prompt, or an option is unknown; the message suggests the right
                name.
            ValueError: a prompt is empty or too long, or options are unusable.
        """
        asked = self._asked(**checked_options(options))
        one, several = read_prompts(prompts)
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
        return results[0] if one else results

    @options_by_name
    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """Continue one text and yield it as it is generated.

        Args:
            prompt: a text or its token ids, as for ``generate``.
            **options: fields of ``GenerationOptions``.

        Raises:
            TypeError: there are several prompts, or an option is unknown.
        """
        one, prompts = read_prompts(prompt)
        if not one:
            raise TypeError("LLM.stream: streams one prompt; LLM.generate takes several")
        return self._stream(prompts[0], self._asked(**checked_options(options)))

    def _stream(self, prompt: str | Sequence[int], asked: _Asked) -> Iterator[str]:
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

    @options_by_name
    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dialogue: Dialogue | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Answer a dialogue.

        The checkpoint's chat template writes the dialogue; without one, the format that DeepSeek-V4
        or V4.1 was trained on is used. Code in a checkpoint's directory is never run.

        Args:
            messages: mappings with "role" ("system", "user", "assistant" or "tool") and "content",
                a string or a list of parts of type "text". An assistant's message may hold
                "tool_calls" in place of content, and "reasoning_content" or "reasoning"; a tool's
                message names the call that it answers in "tool_call_id". A bare string is one
                message of the user.
            tools: functions that may be called, in the OpenAI API's form.
            thinking: True to think before the answer; None for the chat template's default, or for
                no thinking without a template.
            reasoning_effort: thoroughness of the thinking, which it turns on: "low", "high" or
                "max", for V4.1 also 1 to 100; "none" turns it off.
            continue_final_message: True to continue the last message, an assistant's, instead of
                answering it; None to do so if the last message is an assistant's text.
            chat_template_kwargs: further variables of the chat template.
            dialogue: caches of the turns before, see ``dialogue``; None to read all messages.
            **options: fields of ``GenerationOptions``.

        Returns:
            The answer in ``text``, and separately its ``reasoning`` and ``tool_calls``. An answer
            that breaks the format is all text.

        Raises:
            ConfigError: the chat template refuses the messages, or there is none and the tokenizer
                lacks tokens that the format needs.
            ValueError: invalid messages, tools or options.
        """
        answer = self.stream_chat(
            messages,
            tools=tools,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            dialogue=dialogue,
            **options,
        )
        for _ in answer:
            pass
        return answer.result

    @options_by_name
    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dialogue: Dialogue | None = None,
        **options: Unpack[GenerationOptions],
    ) -> ChatAnswer:
        """Answer a dialogue part by part, thinking and text separately, as they are generated.

        Arguments are those of ``chat``.

        Returns:
            An iterator over parts, each with ``kind`` ("reasoning" or "text") and ``text``; after
            the last part, its ``result`` is the whole answer.
        """
        asked = self._asked(**checked_options(options))
        chat = ChatOptions(
            tools, thinking, reasoning_effort, continue_final_message, chat_template_kwargs or {}
        )
        written = self._written(messages, chat)
        if dialogue is None:
            ids = self._encode(written.text)
            request = self._request("0", ids, asked)
            engine = self.engine([request])
        else:
            ids = dialogue.encode(written.text)
            request = self._request("0", ids, asked)
            check_request(request, self.config)
            engine = dialogue.engine(request)
        return ChatAnswer(
            engine,
            request,
            self.tokenizer,
            prompt=written.text,
            thinks=written.thinks,
            stop=asked.stop,
            dialogue=dialogue,
        )

    def dialogue(self) -> Dialogue:
        """Create the caches for one dialogue, so that each turn reads only its new tokens."""
        return Dialogue(self.model, self.tokenizer, self._options, ends=self._ends)

    @property
    def _ends(self) -> frozenset[int]:
        """Return the ids of tokens that end a text."""
        return frozenset(self.config.eos_token_ids) | frozenset(self.defaults.eos_token_ids)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | int | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a dialogue's token ids up to the next answer; arguments as for ``chat``."""
        chat = ChatOptions(
            tools, thinking, reasoning_effort, continue_final_message, chat_template_kwargs or {}
        )
        return list(self._encode(self._written(messages, chat).text))

    def _encode(self, dialogue: str) -> tuple[int, ...]:
        most = self.config.max_position_embeddings
        return tuple(self.tokenizer.encode(dialogue, leading=False, most=most))

    def _written(self, messages: Messages, options: ChatOptions) -> ChatText:
        if self._chat_format is None:
            self._chat_format = chat_format(
                self._directory, self.config.family.encoding, self.tokenizer
            )
        return self._chat_format.write(read_messages(messages), options)

    def _asked(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **sampling: float | None,
    ) -> _Asked:
        said = self.defaults
        return _Asked(
            max_new_tokens=max_new_tokens
            if max_new_tokens is not None
            else said.max_new_tokens or self.new_tokens,
            is_length_given=max_new_tokens is not None,
            sampling=sampling_of(said, sampling),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=frozenset() if ignore_eos else self._ends,
        )

    def _request(self, name: str, prompt: str | Sequence[int], asked: _Asked) -> Request:
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
    """Text of a request while it runs."""

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
        return Generation.of(done, "".join(self._parts))
