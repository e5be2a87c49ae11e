"""Conversion of prompts on the command line and in files to requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from anymla.cli.bad_input import BadInput
from anymla.cli.files import read_text_lines
from anymla.formats.untrusted import parse_object
from anymla.model.config import ModelConfig
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.request import Request, check_request, default_new_tokens
from anymla.runtime.sampler import DEFAULTED, Sampling

_NEW_TOKENS = 64
_BATCH_KEYS = {"id", "prompt", "token_ids", "max_new_tokens", "seed", *DEFAULTED}


@dataclasses.dataclass(frozen=True)
class RequestDefaults:
    """Parameters of requests whose prompt does not set them.

    Attributes:
        max_new_tokens: most tokens to generate; None for 64, or fewer if the context ends before.
        sampling: parameters of the choice of tokens.
        stop_ids: ids of tokens that end a text.
    """

    max_new_tokens: int | None
    sampling: Sampling
    stop_ids: frozenset[int]


class RequestReader:
    """Makes requests, and refuses those that the model cannot run.

    Attributes:
        tokenizer: tokenizer of the checkpoint.
        config: configuration of the checkpoint.
        defaults: parameters of prompts that do not set them.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, defaults: RequestDefaults
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.defaults = defaults

    def from_text(self, name: str, text: str) -> Request:
        """Make a request of one prompt.

        Raises:
            ValueError: the prompt is empty or too long.
        """
        token_ids = self._encoded(text)
        request = Request(
            request_id=name,
            token_ids=token_ids,
            max_new_tokens=self._new_tokens(len(token_ids)),
            sampling=self.defaults.sampling,
            stop_ids=self.defaults.stop_ids,
        )
        check_request(request, self.config)
        return request

    def from_batch(self, path: Path) -> list[Request]:
        """Make one request for each line of JSON.

        A line has "prompt" or "token_ids", and optionally "id", "max_new_tokens", "temperature",
        "top_p", "top_k", "min_p", the three penalties and "seed". Blank lines are skipped; the
        default id is the line's number.

        Raises:
            BadInput: a line is unusable (the message has its number), there is no line, or the file
                cannot be read.
        """
        requests: dict[str, Request] = {}
        for number, line in read_text_lines(path):
            try:
                request = self._from_line(str(number), line)
                if request.request_id in requests:
                    raise ValueError(f"the id {request.request_id!r} is taken by an earlier line")
            except ValueError as error:
                raise BadInput(f"{path} line {number}: {error}") from error
            requests[request.request_id] = request
        if not requests:
            raise BadInput(f"{path}: no prompt in it")
        return list(requests.values())

    def _from_line(self, default_id: str, line: str) -> Request:
        fields = parse_object(line)
        if unknown := sorted(fields.keys() - _BATCH_KEYS):
            raise ValueError(
                f"unknown key {unknown[0]!r}, known are {', '.join(sorted(_BATCH_KEYS))}"
            )
        if ("prompt" in fields) == ("token_ids" in fields):
            raise ValueError('needs either "prompt" or "token_ids"')
        request_id = fields.get("id", default_id)
        if type(request_id) not in (str, int):
            raise ValueError(f'"id" must be a string or an integer, got {request_id!r}')
        token_ids = self._token_ids(fields)
        request = Request(
            request_id=str(request_id),
            token_ids=token_ids,
            max_new_tokens=_integer(fields, "max_new_tokens", self._new_tokens(len(token_ids))),
            sampling=_sampling(fields, self.defaults.sampling),
            stop_ids=self.defaults.stop_ids,
        )
        check_request(request, self.config)
        return request

    def _token_ids(self, fields: dict[str, Any]) -> tuple[int, ...]:
        if "token_ids" in fields:
            return as_token_ids(fields["token_ids"])
        text = fields["prompt"]
        if not isinstance(text, str):
            raise ValueError(f'"prompt" must be a string, got {text!r}')
        return self._encoded(text)

    def _new_tokens(self, prompt_length: int) -> int:
        given = self.defaults.max_new_tokens
        if given is not None:
            return given
        return default_new_tokens(_NEW_TOKENS, prompt_length, self.config)

    def _encoded(self, text: str) -> tuple[int, ...]:
        most = self.config.max_position_embeddings
        return tuple(self.tokenizer.encode(text, most=most)) if text else ()


def as_token_ids(value: Any) -> tuple[int, ...]:
    """Check a JSON list of token ids.

    Raises:
        ValueError: the value is anything else.
    """
    if not isinstance(value, list):
        raise ValueError(f'"token_ids" must be a list of integers, got {type(value).__name__}')
    for token in value:
        if type(token) is not int:
            raise ValueError(f'"token_ids" must hold integers, got {token!r}')
    return tuple(value)


def _sampling(fields: dict[str, Any], default: Sampling) -> Sampling:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(Sampling):
        read = _integer if field.type == "int" else _number
        given[field.name] = read(fields, field.name, getattr(default, field.name))
    return Sampling(**given)


def _integer(fields: dict[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if type(value) is not int:
        raise ValueError(f'"{key}" must be an integer, got {value!r}')
    return value


def _number(fields: dict[str, Any], key: str, default: float) -> float:
    value = fields.get(key, default)
    if type(value) not in (int, float):
        raise ValueError(f'"{key}" must be a number, got {value!r}')
    return float(value)
