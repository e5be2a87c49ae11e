"""``anymla generate``: continue prompts, one streamed or many together."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from anymla.cli import commands
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import STANDARD, read_text, refuse_overwriting, write_text
from anymla.cli.manners import on_terminal
from anymla.cli.numbers import count
from anymla.cli.prompts import RequestDefaults, RequestReader
from anymla.cli.run_options import RunOptions, json_option, run_options
from anymla.cli.sampling_options import sampling_options
from anymla.cli.speed import say_speed, say_speed_of_all
from anymla.cli.terminal import held_stderr, say
from anymla.model.config import ModelConfig
from anymla.model.drafts import DRAFTS, Drafts
from anymla.model.generation import GenerationDefaults
from anymla.model.tokenizer import Tokenizer
from anymla.ops.registry import BackendUnavailable
from anymla.runtime.cache_view import PAGE_KINDS, dump_pages
from anymla.runtime.engine import Engine
from anymla.runtime.request import Completion, Request, RequestState
from anymla.runtime.sampler import sampling_of
from anymla.runtime.stop_text import StopText


@commands.command(
    examples=[
        'anymla generate examples/tiny/checkpoint -p "In the beginning" -n 24',
        "anymla generate examples/tiny/checkpoint -f examples/tiny/README.md --speculate",
        "torchrun --nproc-per-node 2 -m anymla generate DIR --requests-file a.jsonl --json b.json",
    ],
    no_args_is_help=True,
)
@click.option("-p", "--prompt", metavar="TEXT", help="Continue this text.")
@click.option(
    "-f",
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Continue the text of this file.",
)
@click.option(
    "--requests-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Continue many: lines of JSON with "prompt" or "token_ids", and, if wanted, "id", '
    '"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", '
    '"repetition_penalty", "presence_penalty", "frequency_penalty".',
)
@click.option("--batch", type=click.Path(path_type=Path), hidden=True)
@click.option(
    "-n",
    "--max-new-tokens",
    type=int,
    help="Tokens to generate.  [default: 64, or fewer where the context ends before]",
)
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--speculate", is_flag=True, help="Draft with what the checkpoint holds, and verify.")
@click.option(
    "--drafts",
    type=click.Choice(DRAFTS),
    help="The drafter: the same as --speculate (auto), none, whose tensors are not read then "
    "(off), or this one.  [default: off]",
)
@count(
    "--draft-tokens",
    help="Tokens guessed ahead; default: one for each MTP layer, or DSpark's block.",
)
@click.option(
    "--adapt-drafts",
    is_flag=True,
    help="Verify only as many drafts in a step as have paid lately.",
)
@count("--max-requests", default=8, help="Requests of a batch that run at once.")
@click.option(
    "--no-graphs",
    is_flag=True,
    help="On CUDA devices, launch every decode step instead of replaying recorded graphs.",
)
@click.option(
    "--dump-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write every finished request's cache pages here, for anymla inspect --cache.",
)
@json_option(required=False)
@run_options
def command(
    *,
    run: RunOptions,
    prompt: str | None,
    prompt_file: Path | None,
    requests_file: Path | None,
    batch: Path | None,
    max_new_tokens: int | None,
    asked: dict[str, Any],
    stop: tuple[str, ...],
    ignore_eos: bool,
    speculate: bool,
    drafts: Drafts | None,
    draft_tokens: int | None,
    adapt_drafts: bool,
    max_requests: int,
    no_graphs: bool,
    dump_cache: Path | None,
    json_file: Path | None,
) -> None:
    """Continue a prompt, or a batch of them, with a DeepSeek-V4 or V4.1 checkpoint.

    The text of one prompt is streamed to stdout; of a batch, each text appears when it is finished,
    after its id in brackets. A line on stderr says how fast it was.
    """
    if batch is not None:
        click.echo(
            "--batch is called --requests-file now; the old name goes with the next version",
            err=True,
        )
    if [prompt, prompt_file, requests_file, batch].count(None) != 3:
        raise BadInput("give exactly one of --prompt, --prompt-file and --requests-file")
    requests_file = batch if requests_file is None else requests_file
    if drafts is None:
        drafts = "auto" if speculate else "off"
    elif speculate and drafts == "off":
        raise BadInput("--speculate and --drafts off contradict each other")
    if draft_tokens is not None and drafts == "off":
        raise BadInput("--draft-tokens needs --speculate or --drafts")
    if adapt_drafts and drafts == "off":
        raise BadInput("--adapt-drafts needs --speculate or --drafts")
    refuse_overwriting("--json", json_file, prompt_file, requests_file)
    with bad_input(), held_stderr():
        config = ModelConfig.from_dir(run.checkpoint, drafts=drafts != "off")
        tokenizer = Tokenizer.from_dir(run.checkpoint)
        said = GenerationDefaults.from_dir(run.checkpoint)
        ends = frozenset(config.eos_token_ids) | frozenset(said.eos_token_ids)
        defaults = RequestDefaults(
            max_new_tokens, sampling_of(said, asked), frozenset() if ignore_eos else ends
        )
        StopText(tokenizer.stream(), stop)  # refuses invalid stop strings
        reader = RequestReader(tokenizer, config, defaults)
        if requests_file is not None:
            requests = reader.from_batch(requests_file)
        else:
            text = prompt if prompt is not None else read_text(_given(prompt_file))
            requests = [reader.from_text("prompt", text)]
    began = time.perf_counter()
    model = run.load(drafts)
    if said.unapplied_line is not None and not model.ranks.rank:
        click.echo(said.unapplied_line, err=True)
    loaded = time.perf_counter()
    guessed = 0 if drafts == "off" else draft_tokens or max(1, model.config.default_draft_tokens)
    options = run.engine_options(
        max_requests=max_requests,
        draft_tokens=guessed,
        adapt_drafts=adapt_drafts,
        decode="plain" if no_graphs else "auto",
    )
    with bad_input():
        engine = Engine.for_requests(model, options, requests)
        if dump_cache is not None and not model.ranks.rank:
            dump_cache.mkdir(parents=True, exist_ok=True)
            engine.on_finish = _Dumper(dump_cache)
        for request in requests:
            engine.submit(request)
    with bad_input((BackendUnavailable, FloatingPointError)):
        alone, show = requests_file is None, json_file != STANDARD
        results = _run(engine, requests, tokenizer, stop, alone=alone, show=show)
    ran = time.perf_counter() - loaded
    if json_file is not None and not model.ranks.rank:
        report = {
            "options": run.as_dict() | {"drafts": drafts, "draft_tokens": guessed},
            "results": [_result(done, text) for done, text in results],
            "acceptance_rate": _acceptance([done for done, _ in results]),
            "cache_bytes": engine.store.nbytes,
            "timings": {
                "load_s": loaded - began,
                "run_s": ran,
            },
        }
        write_text(json_file, json.dumps(report, indent=1) + "\n")
    if not model.ranks.rank:
        done = [each for each, _ in results]
        if alone:
            say_speed(done[0])
        else:
            say_speed_of_all(done, ran)


def _given(path: Path | None) -> Path:
    assert path is not None
    return path


def _run(
    engine: Engine,
    requests: list[Request],
    tokenizer: Tokenizer,
    stop: Sequence[str],
    *,
    alone: bool,
    show: bool,
) -> list[tuple[Completion, str]]:
    """Step until all is done, with a bar on stderr; results are in the order of ``requests``."""
    texts = {request.request_id: StopText(tokenizer.stream(), stop) for request in requests}
    shown = dict.fromkeys(texts, "")
    done: dict[str, Completion] = {}
    # Streamed text is its own progress display, so a single request's bar ends with its prompt.
    total = sum(len(request.token_ids) for request in requests)
    if not alone:
        total += sum(request.max_new_tokens for request in requests)
    quiet = bool(engine.model.ranks.rank) or not on_terminal()
    desc = "prefill" if alone else "tokens"
    with tqdm(total=total, desc=desc, unit="token", disable=quiet) as bar:
        while engine.busy:
            report = engine.step()
            bar.update(report.prompt_tokens)
            finished = {each.request.request_id: each for each in report.finished}
            for name, tokens in report.new_tokens.items():
                bar.update(0 if alone else len(tokens))
                for token in tokens:
                    if alone:
                        bar.close()
                    text = texts[name].push(token)
                    shown[name] += text
                    if alone and show:
                        say(text, nl=False)
                if texts[name].stopped:
                    completion = finished.get(name) or engine.cancel(name)
                    finished[name] = completion.cut(texts[name].tokens)
            for name, completion in finished.items():
                done[name] = completion
                rest = texts[name].finish()
                shown[name] += rest
                if alone and show:
                    say(rest)
                elif show:
                    with tqdm.external_write_mode():
                        say(f"[{name}] {shown[name]}")
    return [(done[request.request_id], shown[request.request_id]) for request in requests]


def _result(done: Completion, text: str) -> dict[str, Any]:
    return {
        "id": done.request.request_id,
        "prompt_tokens": len(done.request.token_ids),
        "token_ids": list(done.token_ids),
        "logprobs": list(done.logprobs),
        "text": text,
        "finish_reason": done.finish_reason,
        "drafted": done.drafted,
        "accepted": done.accepted,
        "timings": done.timings.as_dict(),
    }


def _acceptance(completions: list[Completion]) -> float | None:
    """Return the fraction of drafted tokens that were right; None without drafts."""
    drafted = sum(done.drafted for done in completions)
    return sum(done.accepted for done in completions) / drafted if drafted else None


class _Dumper:
    """Writes a finished request's pages, one file per layer and kind of cache."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0

    def __call__(self, engine: Engine, state: RequestState) -> None:
        for group in engine.store.groups:
            if group.kind not in PAGE_KINDS:
                continue
            for layer in group.layers:
                # Ids come from the user and may not be file names.
                name = f"request{self.number}.layer{layer}.{group.kind}.safetensors"
                dump_pages(engine.store, state, layer, group.kind, self.directory / name)
        self.number += 1
