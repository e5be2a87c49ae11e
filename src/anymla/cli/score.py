"""``anymla score``: the log-probability of every token of a text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import STANDARD, read_text, refuse_overwriting, write_text
from anymla.cli.manners import on_terminal
from anymla.cli.prompts import as_token_ids
from anymla.cli.run_options import RunOptions, json_option, run_options
from anymla.cli.terminal import held_stderr
from anymla.formats.untrusted import Refused, parse_json
from anymla.model.config import ModelConfig
from anymla.model.tokenizer import Tokenizer
from anymla.ops.registry import BackendUnavailable
from anymla.runtime.engine import Engine
from anymla.runtime.request import Completion, Request, check_request


@commands.command(
    examples=["anymla score examples/tiny/checkpoint -f examples/tiny/README.md --json score.json"],
    no_args_is_help=True,
)
@click.option(
    "-f", "--prompt-file", type=click.Path(path_type=Path), metavar="FILE", help="Score this text."
)
@click.option(
    "--token-ids",
    "token_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Score these tokens: a JSON list, or an object with a list "token_ids".',
)
@json_option(required=True)
@run_options
def command(
    *, run: RunOptions, prompt_file: Path | None, token_file: Path | None, json_file: Path
) -> None:
    """Score a text: log-probability (natural) of each token given those before it.

    Writes {"token_ids": [...], "logprobs": [null, ...]}; nothing precedes the first token.
    """
    if (prompt_file is None) == (token_file is None):
        raise BadInput("give exactly one of --prompt-file and --token-ids")
    refuse_overwriting("--json", json_file, prompt_file, token_file)
    with bad_input(), held_stderr():
        config = ModelConfig.from_dir(run.checkpoint, drafts=False)
        if prompt_file is not None:
            text = read_text(prompt_file)
            tokenizer, most = Tokenizer.from_dir(run.checkpoint), config.max_position_embeddings
            token_ids = tuple(tokenizer.encode(text, most=most)) if text else ()
        else:
            assert token_file is not None
            token_ids = _read_token_ids(token_file)
        request = Request("score", token_ids, max_new_tokens=0, prompt_logprobs=True)
        check_request(request, config)
    model = run.load()
    with bad_input():
        engine = Engine.for_requests(model, run.engine_options(), [request])
        engine.submit(request)
    with bad_input((BackendUnavailable, FloatingPointError)):
        logprobs = _run(engine, len(token_ids)).prompt_logprobs
    assert logprobs is not None
    result = {"token_ids": list(token_ids), "logprobs": list(logprobs)}
    if model.ranks.rank:
        return
    write_text(json_file, json.dumps(result) + "\n")
    known = [logprob for logprob in logprobs if logprob is not None]
    if known and json_file != STANDARD:
        mean = -math.fsum(known) / len(known)
        click.echo(f"{len(token_ids)} tokens, {mean:.6f} nats each, perplexity {_exp(mean):.4f}")


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _read_token_ids(path: Path) -> tuple[int, ...]:
    try:
        value = parse_json(read_text(path))
    except Refused as error:
        raise BadInput(f"{path}: {error}") from error
    if isinstance(value, dict):
        value = value.get("token_ids")
    try:
        return as_token_ids(value)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def _run(engine: Engine, num_tokens: int) -> Completion:
    quiet = bool(engine.model.ranks.rank) or not on_terminal()
    with tqdm(total=num_tokens, desc="scoring", unit="token", disable=quiet) as bar:
        while True:
            report = engine.step()
            bar.update(report.prompt_tokens)
            if report.finished:
                return report.finished[0]
