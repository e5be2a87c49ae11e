"""``anymla conformance --end-to-end``: passkeys in a long text, at several lengths and depths."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch

from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.report import Result, append_rows
from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import read_text
from anymla.engines.vllm.answers import (
    CPU_TAKES,
    GPU_TAKES,
    EngineFailed,
    answers,
    missing_sizes,
)
from anymla.engines.vllm.pinned import installed_version
from anymla.formats.untrusted import read_object
from anymla.runtime.devices import named_device
from anymla.runtime.llm import LLM
from anymla.testing.likelihood import compare
from anymla.testing.retrieval import (
    ANSWER,
    FAULTS,
    Finding,
    Hidden,
    judge,
    questions,
    survey,
)
from anymla.testing.widen import widen

PART, TEXT_PART = "retrieval of a passkey", "text with one thing broken"
_COMMAND = "anymla conformance --end-to-end"
_WIDTH = 22
_TEXT = 4096  # largest number of tokens whose log-probabilities are compared


def ask_for_passkeys(
    checkpoint: Path,
    text: Path,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    faults: bool,
    backend: str | None,
    device: str | None,
    json_file: Path | None,
) -> None:
    """Print a line per length and fault, with a mark per depth; append rows to a file.

    Raises:
        BadInput: the checkpoint, text or device does not exist, or the text is too short.
        click.ClickException: a passkey was not found with nothing broken.
    """
    with bad_input():
        words = read_text(text)
        place = named_device(device)
        llm = LLM(checkpoint, device=place, backend=backend)
    _head(text, depths)
    found: list[Finding] = []
    for length in lengths:
        with bad_input():
            some = list(survey(llm, words, [length], depths, FAULTS if faults else ()))
        _show(length, some)
        found += some
    rows = _passkey_rows(found)
    if faults:
        with bad_input():
            exact = LLM(checkpoint, device=place, backend=backend, dtype="fp32")
        token_ids = llm.tokenizer.encode(words)[: min(max(lengths), _TEXT)]
        rows += _weigh(exact, llm, token_ids)
    _conclude(found, rows, json_file, on_gpu=place.type != "cpu")


def _weigh(exact: LLM, rounded: LLM, token_ids: Sequence[int]) -> list[Result]:
    """Show the faults' effect on the text's log-probabilities next to that of rounding."""
    click.echo(f"log-probabilities of the text itself, {len(token_ids)} tokens, in float32")
    rows = []
    for name, moved in compare(exact, token_ids, rounded=rounded):
        click.echo(f"  {name:{_WIDTH - 2}} {moved}")
        case = f"{len(token_ids)} tokens, {name}"
        rows.append(Result(TEXT_PART, case, {"fault": name, **dataclasses.asdict(moved)}))
    return rows


def ask_vllm_for_passkeys(
    checkpoint: Path,
    text: Path,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    json_file: Path | None,
) -> None:
    """Put the same questions to vLLM with the plugin and, on a GPU, to vLLM alone.

    A checkpoint of sizes that vLLM does not support is padded to sizes that it does.

    Raises:
        BadInput: if the input cannot be used, or vLLM is not installed.
        click.ClickException: vLLM failed, or a passkey was not found.
    """
    version = installed_version()
    if version is None:
        raise BadInput("vLLM is not installed here")
    on_gpu = torch.cuda.is_available()
    with bad_input():
        words = read_text(text)
        llm = LLM(checkpoint, device=torch.device("cpu"))
        asked = list(questions(llm, words, lengths, depths))
    _head(text, depths)
    modes = {"alone": "off", "with the plugin": "force"} if on_gpu else {"with the plugin": "auto"}
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        with bad_input():
            served = _fit(checkpoint, Path(name), on_gpu=on_gpu)
        for manner, mode in modes.items():
            engine = f"vLLM {version} {manner}"
            click.echo(engine)
            some = list(_answers(llm, served, asked, engine, mode))
            for length in lengths:
                _show(length, [each for each in some if each.length == length])
            found += some
    _conclude(found, _passkey_rows(found), json_file, " --engine vllm", on_gpu=on_gpu)


def _fit(checkpoint: Path, directory: Path, *, on_gpu: bool) -> Path:
    """Return the checkpoint, or an equivalent one in a directory whose sizes vLLM supports."""
    config = read_object(checkpoint / "config.json")
    sizes = missing_sizes(config, GPU_TAKES if on_gpu else CPU_TAKES)
    # On most CPUs vLLM has no kernels for FP8 and MXFP4 weights.
    plain = not on_gpu and "quantization_config" in config
    if not sizes and not plain:
        return checkpoint
    words = [f"{name} {size}" for name, size in sizes.items()] + ["weights in bfloat16"] * plain
    click.echo(f"the checkpoint is padded for vLLM: {', '.join(words)}")
    widen(checkpoint, directory, sizes, plain=plain)
    return directory


def _answers(
    llm: LLM,
    served: Path,
    asked: Sequence[tuple[int, float, Hidden]],
    engine: str,
    mode: str,
) -> Iterator[Finding]:
    prompts = [hidden.token_ids for _, _, hidden in asked]
    stops = llm.config.eos_token_ids
    try:
        replies = answers(served, prompts, mode=mode, new_tokens=ANSWER, stop_ids=stops)
    except EngineFailed as error:
        raise click.ClickException(str(error)) from error
    for (length, depth, hidden), reply in zip(asked, replies, strict=True):
        answer = judge(llm, hidden, reply.token_ids, reply.logprobs)
        yield Finding(length, depth, "none", answer, engine)


def _head(text: Path, depths: Sequence[float]) -> None:
    shown = " ".join(f"{depth:g}" for depth in depths)
    click.echo(f"passkeys in {text.name}, at depths {shown}: + found, - not")


def _show(length: int, found: Sequence[Finding]) -> None:
    marks: dict[str, list[str]] = {}
    for each in found:
        marks.setdefault(each.fault, []).append("+" if each.answer.found else "-")
    for name, some in marks.items():
        label = f"{length} tokens" if name == "none" else f"  {name}"
        click.echo(f"{label:{_WIDTH}} {' '.join(some)}")


def _passkey_rows(found: Sequence[Finding]) -> list[Result]:
    return [Result(PART, _case(each), each.as_dict()) for each in found]


def _case(found: Finding) -> str:
    engine = "" if found.engine == "anymla" else f", {found.engine}"
    return f"{found.length} tokens, depth {found.depth:g}, {found.fault}{engine}"


def _conclude(
    found: Sequence[Finding],
    rows: Sequence[Result],
    json_file: Path | None,
    words: str = "",
    *,
    on_gpu: bool,
) -> None:
    if json_file is not None:
        facts = environment(_COMMAND + words) | (device_facts() if on_gpu else {})
        with bad_input():
            append_rows(json_file, rows, facts)
    missed = sum(each.fault == "none" and not each.answer.found for each in found)
    if missed:
        raise click.ClickException(f"{missed} passkeys were not found")
