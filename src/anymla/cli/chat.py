"""``anymla chat``: a dialogue, line by line."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.manners import on_terminal
from anymla.cli.run_options import RunOptions, run_options
from anymla.cli.sampling_options import sampling_options
from anymla.cli.speed import say_speed
from anymla.cli.terminal import escaped, held_stderr, say
from anymla.model.answers import Part
from anymla.model.drafts import DRAFTS, Drafts
from anymla.ops.registry import BackendUnavailable
from anymla.runtime.dialogue import ChatAnswer
from anymla.runtime.generation import Generation
from anymla.runtime.llm import LLM
from anymla.runtime.sampler import sampling_of

_NEW_TOKENS, _NEW_TOKENS_THINKING = 256, 8192
_EXIT = ("/exit", "/quit", "/bye")
_HELP = ("/help", "/?")
_COMMANDS = "/reset forgets the dialogue, /exit ends it (so does Ctrl-D), Ctrl-C ends an answer"
# A word after a slash and nothing else is a command; a path or a sentence is a message.
_COMMAND = re.compile(r"/(\?|[A-Za-z]+)")


@commands.command(
    examples=[
        "anymla chat examples/tiny/checkpoint",
        'echo "The passkey is 482193. What is the passkey?" | anymla chat examples/tiny/checkpoint',
    ],
    no_args_is_help=True,
)
@click.option("--system", metavar="TEXT", help="What the model is told before the dialogue.")
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    help="Most tokens of an answer.  [default: what generation_config.json says, else "
    f"{_NEW_TOKENS}, with thinking {_NEW_TOKENS_THINKING}; fewer where the context ends before]",
)
@click.option(
    "--thinking/--no-thinking",
    default=None,
    help="Think before an answer.  [default: as the chat template says, without one: do not]",
)
@click.option(
    "--reasoning-effort",
    metavar="LEVEL",
    help="Think so thoroughly: low, high or max; for V4.1 also 1 to 100.",
)
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option(
    "--drafts",
    type=click.Choice(DRAFTS),
    default="auto",
    show_default=True,
    help="Draft with what the checkpoint holds, or not.",
)
@run_options
def command(
    *,
    run: RunOptions,
    system: str | None,
    max_new_tokens: int | None,
    thinking: bool | None,
    reasoning_effort: str | None,
    asked: dict[str, Any],
    stop: tuple[str, ...],
    drafts: Drafts,
) -> None:
    """Talk with a checkpoint: each line of stdin is a message, each answer is streamed to stdout.

    Messages are written as the checkpoint's chat template says, without one as DeepSeek-V4 and V4.1
    are trained. Thinking is dimmed on a terminal; elsewhere it goes to stderr, where a line after
    each answer says how fast it was. Ctrl-C ends an answer, and the program where it waits for a
    message. /reset forgets the dialogue, /exit or the end of the input (Ctrl-D) ends.
    """
    with bad_input(), held_stderr():
        llm = LLM(
            run.checkpoint,
            device=run.device,
            dtype=run.dtype,
            kv_cache=run.kv_cache,
            drafts=drafts,
            backend=run.backend,
            chunk_size=run.chunk_size,
            threads=run.threads,
            progress=on_terminal(),
        )
        sampling_of(llm.defaults, asked)  # refuses invalid values
    thinks = thinking or reasoning_effort not in (None, "none")
    llm.new_tokens = _NEW_TOKENS_THINKING if thinks else _NEW_TOKENS
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "thinking": thinking,
        "reasoning_effort": _effort(reasoning_effort),
        "stop": stop,
        **asked,
    }
    begin = [] if system is None else [{"role": "system", "content": system}]
    messages: list[dict[str, Any]] = list(begin)
    dialogue = llm.dialogue()
    if sys.stdin.isatty() and on_terminal():
        click.echo(_COMMANDS, err=True)
    while line := _ask():
        if _COMMAND.fullmatch(line):
            if line in _EXIT:
                return
            if line == "/reset":
                messages = list(begin)
            elif line not in _HELP:
                click.echo(f"no command {line}: {_COMMANDS}", err=True)
            else:
                click.echo(_COMMANDS, err=True)
            continue
        messages.append({"role": "user", "content": line})
        try:
            with bad_input():
                answer = llm.stream_chat(messages, dialogue=dialogue, **options)
        except BadInput as error:
            if not sys.stdin.isatty():
                raise
            error.show()  # the next message may work
            messages.pop()
            continue
        with _interrupts(answer.stop), bad_input((BackendUnavailable, FloatingPointError)):
            _show(answer)
        said = answer.result
        if said.token_ids:
            messages.append(_message(said))
        else:  # interrupted before the first token: the message is dropped
            messages.pop()
        if answer.completion is not None:
            cut = said.finish_reason == "length"
            say_speed(answer.completion, ", cut by --max-new-tokens" if cut else "")


def _effort(given: str | None) -> str | int | None:
    return int(given) if given is not None and given.isdecimal() else given


def _ask() -> str:
    """Read the next message that is not empty; "" at the end of the input."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip()


def _show(answer: ChatAnswer) -> None:
    """Print an answer as it is generated, thinking separately, tool calls one a line."""
    shown = _Shown()
    for part in answer:
        shown.part(part)
    shown.end()
    for call in answer.result.tool_calls:
        function = call["function"]
        say(f"{function['name']}({function['arguments']})")


class _Shown:
    """State of an answer's display."""

    def __init__(self) -> None:
        self._dims = sys.stdout.isatty()
        self._kind = ""

    def part(self, part: Part) -> None:
        """Print a piece; thinking is dimmed, or goes to stderr if stdout is no terminal."""
        if part.kind != self._kind:
            self._leave(part.kind)
        if part.kind == "text":
            say(part.text, nl=False)
        elif self._dims:
            click.echo(click.style(escaped(part.text), dim=True), nl=False, color=True)
        else:
            click.echo(escaped(part.text) if on_terminal() else part.text, nl=False, err=True)

    def end(self) -> None:
        """End the line."""
        self._leave("")
        say("")

    def _leave(self, kind: str) -> None:
        if self._kind == "reasoning":
            click.echo("\n" if self._dims and kind else "", err=not self._dims)
        self._kind = kind


def _message(said: Generation) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = list(said.tool_calls)
    return message


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first Ctrl-C; the second one ends the program as usual."""
    usual = signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is not usual:  # the program's parent ignores the signal
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
