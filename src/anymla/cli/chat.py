"""``anymla chat``: a dialogue, line by line."""

from __future__ import annotations

import sys

import click

from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.manners import on_terminal
from anymla.cli.run_options import RunOptions, run_options
from anymla.cli.sampling_options import AskedSampling, sampling_options
from anymla.cli.terminal import held_stderr, say
from anymla.model.drafts import DRAFTS, Drafts
from anymla.ops.registry import BackendUnavailable
from anymla.runtime.llm import LLM


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
    help="Of an answer.  [default: what generation_config.json says, else 256; fewer where the "
    "context ends before]",
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
    asked: AskedSampling,
    stop: tuple[str, ...],
    drafts: Drafts,
) -> None:
    """Talk with a checkpoint: each line of stdin is a message, each answer is streamed to stdout.

    Messages are written as the checkpoint's chat template says. Ends with the input (Ctrl-D).
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
        asked.sampling(llm.defaults)
        llm.new_tokens = 256
    messages = [] if system is None else [{"role": "system", "content": system}]
    while line := _ask():
        messages.append({"role": "user", "content": line})
        with bad_input():
            prompt = llm.chat_prompt(messages)
            answer = llm.stream(
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                min_p=asked.min_p,
                repetition_penalty=asked.repetition_penalty,
                presence_penalty=asked.presence_penalty,
                frequency_penalty=asked.frequency_penalty,
                seed=asked.seed,
                stop=stop,
            )
            parts = [next(answer, "")]  # what it refuses, it refuses here
        say(parts[0], nl=False)
        with bad_input((BackendUnavailable, FloatingPointError)):
            for part in answer:
                parts.append(part)
                say(part, nl=False)
        say("")
        messages.append({"role": "assistant", "content": "".join(parts)})


def _ask() -> str:
    """The next message that is not empty; an empty one at the end of the input."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip()
