"""``anymla generate``: continue prompts, one streamed or many together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import STANDARD, read_text, refuse_overwriting, write_text
from anymla.cli.manners import on_terminal
from anymla.cli.prompts import RequestDefaults, RequestReader
from anymla.cli.run_options import RunOptions, json_option, run_options
from anymla.cli.terminal import held_stderr, say
from anymla.model.config import ModelConfig
from anymla.model.drafts import DRAFTS, Drafts
from anymla.model.tokenizer import Tokenizer
from anymla.ops.registry import BackendUnavailable
from anymla.runtime.cache_view import PAGE_KINDS, dump_pages
from anymla.runtime.engine import Engine
from anymla.runtime.request import Completion, Request, RequestState
from anymla.runtime.sampler import Sampling


@click.command()
@click.option("--prompt", metavar="TEXT", help="Continue this text.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Continue the text of this file.",
)
@click.option(
    "--batch",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Continue many: lines of JSON with "prompt" or "token_ids", and, if wanted, "id", '
    '"max_new_tokens", "temperature", "top_p", "seed".',
)
@click.option("--max-new-tokens", default=64, show_default=True, help="Tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the best token.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Choose among the best that reach this mass."
)
@click.option("--seed", default=0, show_default=True, help="Same seed, same tokens.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--speculate", is_flag=True, help="Draft with what the checkpoint holds, and verify.")
@click.option(
    "--drafts",
    type=click.Choice(DRAFTS),
    help="The drafter: the same as --speculate (auto), none, whose tensors are not read then "
    "(off), or this one.  [default: off]",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=1),
    help="Tokens guessed ahead; default: one for each MTP layer, or DSpark's block.",
)
@click.option(
    "--max-requests",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    help="Requests of a batch that run at once.",
)
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
    batch: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    ignore_eos: bool,
    speculate: bool,
    drafts: Drafts | None,
    draft_tokens: int | None,
    max_requests: int,
    no_graphs: bool,
    dump_cache: Path | None,
    json_file: Path | None,
) -> None:
    """Continue a prompt, or a batch of them, with a DeepSeek-V4 checkpoint.

    The text of one prompt is streamed to stdout; of a batch, each text appears when it is finished,
    after its id in brackets.
    """
    if [prompt, prompt_file, batch].count(None) != 2:
        raise BadInput("give exactly one of --prompt, --prompt-file and --batch")
    if drafts is None:
        drafts = "auto" if speculate else "off"
    elif speculate and drafts == "off":
        raise BadInput("--speculate and --drafts off contradict each other")
    if draft_tokens is not None and drafts == "off":
        raise BadInput("--draft-tokens needs --speculate or --drafts")
    refuse_overwriting("--json", json_file, prompt_file, batch)
    with bad_input(), held_stderr():
        config = ModelConfig.from_dir(run.checkpoint, drafts=drafts != "off")
        tokenizer = Tokenizer.from_dir(run.checkpoint)
        defaults = RequestDefaults(
            max_new_tokens,
            Sampling(temperature, top_p, seed),
            frozenset() if ignore_eos else frozenset(config.eos_token_ids),
        )
        reader = RequestReader(tokenizer, config, defaults)
        if batch is not None:
            requests = reader.from_batch(batch)
        else:
            text = prompt if prompt is not None else read_text(_given(prompt_file))
            requests = [reader.from_text("prompt", text)]
    began = time.perf_counter()
    model = run.load(drafts)
    loaded = time.perf_counter()
    guessed = 0 if drafts == "off" else draft_tokens or max(1, model.config.default_draft_tokens)
    options = run.engine_options(
        max_requests=max_requests,
        draft_tokens=guessed,
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
        alone, show = batch is None, json_file != STANDARD
        completions = _run(engine, requests, tokenizer, alone=alone, show=show)
    if json_file is not None and not model.ranks.rank:
        report = {
            "options": run.as_dict() | {"drafts": drafts, "draft_tokens": guessed},
            "results": [_result(done, tokenizer) for done in completions],
            "acceptance_rate": _acceptance(completions),
            "cache_bytes": engine.store.nbytes,
            "timings": {
                "load_s": loaded - began,
                "run_s": time.perf_counter() - loaded,
            },
        }
        write_text(json_file, json.dumps(report, indent=1) + "\n")


def _given(path: Path | None) -> Path:
    assert path is not None
    return path


def _run(
    engine: Engine, requests: list[Request], tokenizer: Tokenizer, *, alone: bool, show: bool
) -> list[Completion]:
    """Step until all is done, with a bar on stderr; completions in the order of ``requests``."""
    done: dict[str, Completion] = {}
    stream = tokenizer.stream()
    # Streamed text shows its own progress, so the bar of a single request ends with its prompt.
    total = sum(len(request.token_ids) for request in requests)
    if not alone:
        total += sum(request.max_new_tokens for request in requests)
    quiet = bool(engine.model.ranks.rank) or not on_terminal()
    desc = "prefill" if alone else "tokens"
    with tqdm(total=total, desc=desc, unit="token", disable=quiet) as bar:
        while engine.busy:
            report = engine.step()
            bar.update(report.prompt_tokens)
            for completion in report.finished:
                done[completion.request.request_id] = completion
            if alone:
                for token in report.new_tokens.get(requests[0].request_id, ()):
                    bar.close()
                    text = stream.push(token)
                    if show:
                        say(text, nl=False)
                continue
            bar.update(sum(map(len, report.new_tokens.values())))
            for completion in report.finished if show else ():
                with tqdm.external_write_mode():
                    text = tokenizer.decode(completion.token_ids)
                    say(f"[{completion.request.request_id}] {text}")
    if alone and show:
        say(stream.finish())
    return [done[request.request_id] for request in requests]


def _result(done: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "id": done.request.request_id,
        "prompt_tokens": len(done.request.token_ids),
        "token_ids": list(done.token_ids),
        "logprobs": list(done.logprobs),
        "text": tokenizer.decode(done.token_ids),
        "finish_reason": done.finish_reason,
        "drafted": done.drafted,
        "accepted": done.accepted,
        "timings": done.timings.as_dict(),
    }


def _acceptance(completions: list[Completion]) -> float | None:
    """Share of the drafted tokens that were right; None without drafts."""
    drafted = sum(done.drafted for done in completions)
    return sum(done.accepted for done in completions) / drafted if drafted else None


class _Dumper:
    """Writes a finished request's pages, one file a layer and kind of cache."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0

    def __call__(self, engine: Engine, state: RequestState) -> None:
        for group in engine.store.groups:
            if group.kind not in PAGE_KINDS:
                continue
            for layer in group.layers:
                # Ids are the user's and may not be file names.
                name = f"request{self.number}.layer{layer}.{group.kind}.safetensors"
                dump_pages(engine.store, state, layer, group.kind, self.directory / name)
        self.number += 1
