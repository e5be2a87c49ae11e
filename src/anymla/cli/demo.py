"""``anymla demo``: a tiny checkpoint, end to end, checked against the oracle."""

from __future__ import annotations

import pathlib
import textwrap
import time
from typing import cast

import click
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import bad_input
from anymla.cli.files import read_text
from anymla.cli.manners import on_terminal
from anymla.cli.numbers import count
from anymla.model.tokenizer import Tokenizer
from anymla.model.transformer import Transformer
from anymla.ops.device import triton_problem
from anymla.runtime.engine import Engine
from anymla.runtime.llm import LLM
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, Request, check_request
from anymla.testing.likelihood import compare
from anymla.testing.oracle import RecordedModel, Recorder, check_run
from anymla.testing.retrieval import FACT, FAULTS, QUESTION, ask, hide, read
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

# Fewest characters of a text that is continued; tokens of the continuation; depth of the passkey.
_OPENING, _SPOKEN, _DEPTH = 200, 96, 0.3
_PARTS = 4


@commands.command(
    examples=["anymla demo examples/tiny/persuasion.txt --checkpoint examples/tiny/checkpoint"]
)
@click.argument(
    "texts",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=pathlib.Path),
)
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    metavar="DIR",
    help="A trained checkpoint, which first shows what it can; by default a random one is written.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    default=pathlib.Path("demo-output"),
    show_default=True,
    help="Where a random checkpoint is written.",
)
@count("--context", default=32768, help="Tokens in which a trained checkpoint looks for a passkey.")
@count("--prompt-tokens", default=4096, help="Tokens read for the check, at most.")
@count("--new-tokens", default=64, help="Tokens generated for it.")
@count("--chunk-size", default=512, help="Tokens of a prefill step.")
def command(
    texts: tuple[pathlib.Path, ...],
    checkpoint: pathlib.Path | None,
    output: pathlib.Path,
    context: int,
    prompt_tokens: int,
    new_tokens: int,
    chunk_size: int,
) -> None:
    """Run DeepSeek-V4 on a tiny checkpoint that reads TEXTS, and check it against float64.

    Reads the files through chunked prefill and the paged FP8 caches, generates with multi-token
    prediction, and then compares every log-probability, every cache row and every selection with an
    independent float64 oracle. Ends with exit code 1 if they disagree.

    A trained checkpoint continues the text and finds a passkey in it first, then again with one
    thing broken. Without one, a checkpoint is written in DeepSeek's own layout; its weights are
    random, so the generated text is noise.
    """
    text = "\n".join(map(read_text, texts))
    began = time.perf_counter()
    random = checkpoint is None
    directory = output / "checkpoint" if checkpoint is None else checkpoint
    say = _Steps()
    with bad_input():
        if random:
            write_tiny_checkpoint(directory, TinyOptions())
            say(f"wrote {directory}: {_size(directory)} in {time.perf_counter() - began:.1f} s")
        llm = LLM(directory, dtype="fp32", chunk_size=chunk_size, progress=on_terminal())
    model = llm.model
    ratios = ", ".join(str(spec.ratio) for spec in model.layer_specs if spec.role == "backbone")
    layers = f"layers of ratio {ratios}, {len(model.drafts)} MTP"
    if not random:
        say(f"loaded {directory}: {_size(directory)}, {layers}")
        with bad_input():
            _speak(llm, text, say)
            _search(llm, text, context, say)
    prompt = tuple(llm.tokenizer.encode(text)[:prompt_tokens])
    request = Request("demo", prompt, max_new_tokens=new_tokens, prompt_logprobs=True)
    with bad_input():
        check_request(request, model.config)
    if random:
        say(
            f"loaded: {layers}; reading {len(prompt)} tokens of {len(texts)} files, FP8 caches, "
            f"chunks of {chunk_size}"
        )
    recorder = Recorder()
    options = EngineOptions(kv_cache="fp8", chunk_size=chunk_size, draft_tokens=len(model.drafts))
    engine = Engine.for_requests(
        cast("Transformer", RecordedModel(model, recorder)), options, [request]
    )
    done = _run(engine, request, llm.tokenizer if random else None)
    if random:
        seconds = done.timings.as_dict()
        say(
            f"prefill {_rate(len(prompt), seconds['prefill_s'])}, decode "
            f"{_rate(len(done.token_ids) - 1, seconds['decode_s'])}; {done.drafted} MTP drafts "
            f"verified, which random weights seldom pass ({done.accepted} did); caches "
            f"{engine.store.nbytes / 1e6:.2f} MB"
        )
    say(f"checking {len(prompt)} tokens against the float64 oracle, of the same cache bytes")
    assert done.prompt_logprobs is not None
    report = check_run(
        directory,
        recorder.recordings[0],
        [*prompt, *done.token_ids],
        [*done.prompt_logprobs, *done.logprobs],
    )
    for line in report.lines():
        click.echo(f"    {line}")
    if not report.ok:
        raise click.ClickException("the run and the oracle disagree")
    if not random:
        _show_unnoticed(llm, prompt, float(report.allowed))
    problem = triton_problem()
    if problem:
        click.echo(f"{problem}; the torch backend, which ran here, does without")
    click.echo("OK: log-probabilities, cache bytes and selections agree with float64")


class _Steps:
    """Numbering of the demo's parts."""

    def __init__(self) -> None:
        self._done = 0

    def __call__(self, text: str) -> None:
        self._done += 1
        click.echo(f"[{self._done}/{_PARTS}] {text}")


def _size(directory: pathlib.Path) -> str:
    return f"{sum(file.stat().st_size for file in directory.iterdir()) / 1e6:.1f} MB"


def _speak(llm: LLM, text: str, say: _Steps) -> None:
    """Continue the end of the text's first sentences."""
    prompt = text[: text.index(".", min(len(text) - 1, _OPENING)) + 1]
    say("it continues a text that it has not seen:")
    done = llm.generate(prompt, max_new_tokens=_SPOKEN, seed=1)
    for line in textwrap.wrap(f"{prompt} |{done.text}", 92):
        click.echo(f"    {line}")
    steps = len(done.token_ids) - done.accepted
    click.echo(
        f"    {done.accepted} of {done.drafted} MTP drafts accepted: {len(done.token_ids)} tokens "
        f"in {steps} steps"
    )


def _search(llm: LLM, text: str, context: int, say: _Steps) -> None:
    """Find a passkey in the text, intact and with one thing broken."""
    hidden = hide(llm, text, context, _DEPTH)
    say(
        f"reading {context} tokens; at token {hidden.place} they say: "
        f'"{FACT.format(hidden.digits)}"'
    )
    began = time.perf_counter()
    with tqdm(total=context, desc="prefill", unit="token", disable=None) as bar:
        engine = read(llm, hidden, bar.update)
    seconds = time.perf_counter() - began
    click.echo(
        f"    prefill {_rate(context, seconds)}, caches {engine.store.nbytes / 1e6:.1f} MB; then "
        f'"{QUESTION}", and again with one thing broken'
    )
    answers = {"nothing broken": ask(llm, engine, hidden)}
    for fault in FAULTS:
        answers[fault.name] = ask(llm, engine, hidden, fault)
    for name, answer in answers.items():
        right = "right" if answer.found else "WRONG"
        click.echo(
            f"    {name:20} {right}  probability of a token {answer.confidence:.2f}  "
            f"{answer.text!r}"
        )
    if not answers["nothing broken"].found:
        raise click.ClickException(f"the passkey {hidden.digits} was not found")


def _show_unnoticed(llm: LLM, prompt: tuple[int, ...], allowed: float) -> None:
    """Show that faults which a question misses change log-probabilities far beyond the bound."""
    click.echo(f"    the same {len(prompt)} tokens with one thing broken throughout:")
    for name, moved in compare(llm, prompt):
        if name != "none":
            verdict = "noticed" if moved.largest > allowed else "NOT noticed"
            click.echo(
                f"    {name:20} {verdict}  largest difference {moved.largest:.2f} (mean "
                f"{moved.typical:.3f}); {moved.nats:.2f} nats a token, {moved.lost:+.3f}"
            )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f} tokens/s" if tokens and seconds else "nothing"


def _run(engine: Engine, request: Request, tokenizer: Tokenizer | None) -> Completion:
    """Step until the request is done, with a bar for the prompt and the text as it is generated."""
    engine.submit(request)
    stream = None if tokenizer is None else tokenizer.stream()
    # The text that follows shows its own progress, so the bar ends with the prompt.
    with tqdm(total=len(request.token_ids), desc="prefill", unit="token", disable=None) as bar:
        while engine.busy:
            report = engine.step()
            bar.update(report.prompt_tokens)
            for token in report.new_tokens.get(request.request_id, ()):
                bar.close()
                if stream is not None:
                    click.echo(stream.push(token), nl=False)
            if report.finished:
                if stream is not None:
                    click.echo(stream.finish())
                return report.finished[0]
    raise AssertionError("the engine stopped without finishing the request")
