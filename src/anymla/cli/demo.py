"""``anymla demo``: a tiny checkpoint, end to end, and the proof that it came out right."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import cast

import click
import torch
from tqdm import tqdm

from anymla.cli.bad_input import bad_input
from anymla.cli.files import read_text
from anymla.cli.manners import on_terminal
from anymla.model.load import load_model
from anymla.model.tokenizer import Tokenizer
from anymla.model.transformer import Transformer
from anymla.ops.device import triton_problem
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, Request, check_request
from anymla.runtime.threads import threads_for, weights_per_token
from anymla.testing.oracle import RecordedModel, Recorder, check_run
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


def _count(
    name: str, default: int, text: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    number = click.IntRange(min=1)
    return click.option(name, default=default, show_default=True, type=number, help=text)


@click.command()
@click.argument(
    "texts",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=pathlib.Path),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    default=pathlib.Path("demo-output"),
    show_default=True,
    help="Where the checkpoint is written.",
)
@_count("--prompt-tokens", 4096, "Tokens read, at most.")
@_count("--new-tokens", 64, "Tokens generated.")
@_count("--chunk-size", 512, "Tokens of a prefill step.")
def command(
    texts: tuple[pathlib.Path, ...],
    output: pathlib.Path,
    prompt_tokens: int,
    new_tokens: int,
    chunk_size: int,
) -> None:
    """Run DeepSeek-V4 on a tiny checkpoint that reads TEXTS, and check it against float64.

    Writes a checkpoint in DeepSeek's own layout, loads it, reads the files through chunked prefill
    and the paged FP8 caches, generates with multi-token prediction, and then compares every
    log-probability, every cache row and every selection with an independent float64 oracle. Ends
    with exit code 1 if they disagree. The weights are random, so the generated text is noise.
    """
    text = "\n".join(map(read_text, texts))
    directory = output / "checkpoint"
    began = time.perf_counter()
    with bad_input():
        write_tiny_checkpoint(directory, TinyOptions())
    size = sum(file.stat().st_size for file in directory.iterdir())
    _say(1, f"wrote {directory}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")

    torch.set_num_threads(threads_for(weights_per_token(directory)))
    model = load_model(directory, dtype=torch.float32, progress=on_terminal())
    ratios = ", ".join(str(spec.ratio) for spec in model.layer_specs if spec.role == "backbone")
    tokenizer = Tokenizer.from_dir(directory)
    prompt = tuple(tokenizer.encode(text)[:prompt_tokens])
    _say(
        2,
        f"loaded: layers of ratio {ratios}, {len(model.drafts)} MTP; reading {len(prompt)} "
        f"tokens of {len(texts)} files, FP8 caches, chunks of {chunk_size}",
    )

    recorder = Recorder()
    request = Request("demo", prompt, max_new_tokens=new_tokens, prompt_logprobs=True)
    with bad_input():
        check_request(request, model.config)
    options = EngineOptions(kv_cache="fp8", chunk_size=chunk_size, draft_tokens=len(model.drafts))
    engine = Engine.for_requests(
        cast("Transformer", RecordedModel(model, recorder)), options, [request]
    )
    done = _run(engine, request, tokenizer)
    seconds = done.timings.as_dict()
    _say(
        3,
        f"prefill {_rate(len(prompt), seconds['prefill_s'])}, decode "
        f"{_rate(len(done.token_ids) - 1, seconds['decode_s'])}; {done.drafted} MTP drafts "
        f"verified, which random weights seldom pass ({done.accepted} did); caches "
        f"{engine.store.nbytes / 1e6:.2f} MB",
    )

    assert done.prompt_logprobs is not None
    _say(4, "checking against the float64 oracle, which reads the same cache bytes")
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
    problem = triton_problem()
    if problem:
        click.echo(f"{problem}; the torch backend, which ran here, does without")
    click.echo("OK: log-probabilities, cache bytes and selections agree with float64")


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f} tokens/s" if tokens and seconds else "nothing"


def _say(part: int, text: str) -> None:
    click.echo(f"[{part}/4] {text}")


def _run(engine: Engine, request: Request, tokenizer: Tokenizer) -> Completion:
    """Step until the request is done, with a bar for the prompt and the text as it comes."""
    engine.submit(request)
    stream = tokenizer.stream()
    # The text that follows shows its own progress, so the bar ends with the prompt.
    with tqdm(total=len(request.token_ids), desc="prefill", unit="token", disable=None) as bar:
        while engine.busy:
            report = engine.step()
            bar.update(report.prompt_tokens)
            for token in report.new_tokens.get(request.request_id, ()):
                bar.close()
                click.echo(stream.push(token), nl=False)
            if report.finished:
                click.echo(stream.finish())
                return report.finished[0]
    raise AssertionError("the engine stopped without finishing the request")
