"""Options of every command that runs a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from anymla.cli.bad_input import BadInput, bad_input
from anymla.cli.files import OutputFile
from anymla.cli.manners import on_terminal
from anymla.cli.numbers import count
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.ranks import Ranks
from anymla.model.drafts import Drafts
from anymla.model.hub import local_checkpoint
from anymla.model.load import activation_dtype, dtype_name, load_model
from anymla.model.transformer import Transformer
from anymla.runtime.devices import named_device
from anymla.runtime.launch import joined, launched, local_device, with_peer_memory
from anymla.runtime.options import EngineOptions
from anymla.runtime.threads import threads_for, weights_per_token
from anymla.testing.conformance.ops import all_backends
from crossrun import ptx

# Largest number of threads per CPU that an option may request: more only wait, and too many end the
# process.
_THREADS_A_CPU = 8


def threads_option(*short: str, text: str, **settings: Any) -> Callable[..., Any]:
    """Make the ``--threads N`` option, limited to a number that this machine can run."""

    def check(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
        cpus = os.cpu_count() or 1
        most = _THREADS_A_CPU * cpus
        if value is not None and not 1 <= value <= most:
            raise BadInput(f"--threads {value}: 1 to {most} on this machine of {cpus} CPUs")
        return value

    return click.option(*short, "--threads", type=int, callback=check, help=text, **settings)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Source and run parameters of a model; the fields are the command line's options."""

    checkpoint: Path
    chunk_size: int
    kv_cache: str
    device: str
    dtype: str
    backend: str | None
    all_reduce: str
    threads: int | None

    def load(self, drafts: Drafts = "off") -> Transformer:
        """Load the model, or this process's part of it.

        Args:
            drafts: drafter to load, see ``load_model``.

        Raises:
            BadInput: the device does not exist, or the directory is no usable checkpoint.
        """
        device = local_device(self.device)
        with bad_input():
            dtype = activation_dtype(self.dtype, self.checkpoint)
            ranks = shared_ranks(self.all_reduce, device, dtype)
            if self.threads is None and self.device == "cpu":
                torch.set_num_threads(threads_for(weights_per_token(self.checkpoint)))
            return load_model(
                self.checkpoint,
                dtype=dtype,
                device=device,
                backend=self.backend,
                ranks=ranks,
                drafts=drafts,
                progress=not ranks.rank and on_terminal(),
            )

    def check(self) -> None:
        """Raise BadInput for an unavailable backend; set the number of threads."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.backend is not None and self.backend not in all_backends():
            known = ", ".join(all_backends())
            raise BadInput(f"--backend {self.backend}: there are {known}")

    def engine_options(self, **changes: Any) -> EngineOptions:
        """Return options for an engine."""
        return EngineOptions(kv_cache=self.kv_cache, chunk_size=self.chunk_size, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the options as JSON values for a report."""
        return dataclasses.asdict(self) | {"checkpoint": str(self.checkpoint)}


def shared_ranks(all_reduce: str, device: torch.device, dtype: torch.dtype) -> Ranks:
    """Return torchrun's ranks, which add activations of ``dtype`` by the ``--all-reduce`` way."""
    ranks = launched()
    return with_peer_memory(ranks, device, dtype) if all_reduce == "auto" else ranks


all_reduce_option = click.option(
    "--all-reduce",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "group"]),
    help="How torchrun's ranks add: few rows through each other's memory where the GPUs can "
    "(auto), or all by the process group (NCCL, gloo).",
)


def _ptx_target(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        ptx.install(value)
        ptx.require_newer_gpu()
    except ptx.WrongTarget as error:
        raise BadInput(f"--ptx-target {value}: {error}") from error


ptx_target_option = click.option(
    "--ptx-target",
    type=click.Choice(list(ptx.TARGETS)),
    is_eager=True,  # before the device is asked for anything
    expose_value=False,
    callback=_ptx_target,
    help="Compile kernels for this older NVIDIA target, and execute its PTX on the newer GPU here.",
)
_named_device_option = click.option(
    "--device",
    metavar="NAME",
    help="cpu, cuda, xpu, cuda:1, ...; the accelerator if there is one.",
)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device``, which the command receives, and ``--ptx-target``, which is obeyed here."""
    return _named_device_option(ptx_target_option(function))


def _dtype(_: click.Context, __: click.Parameter, value: str) -> str:
    with bad_input():
        return dtype_name(value)


dtype_option = click.option(
    "--dtype",
    default="bf16",
    show_default=True,
    metavar="[bf16|fp32|auto]",
    callback=_dtype,
    help="Activations; with fp32 they are never quantised. auto: as config.json says, of the two.",
)


def checkpoint_options(function: Callable[..., None]) -> Callable[..., None]:
    """Accept a checkpoint's directory after ``--checkpoint`` or by itself, as ``checkpoint``.

    The function gets None if neither is given.
    """

    @functools.wraps(function)
    def command(*, checkpoint: Path | None, directory: Path | None, **parameters: Any) -> None:
        if checkpoint is not None and directory is not None:
            raise BadInput(f"{directory}: --checkpoint {checkpoint} is given as well")
        function(checkpoint=directory if checkpoint is None else checkpoint, **parameters)

    command = click.option(
        "-m",
        "--checkpoint",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Directory with config.json, tokenizer.json and safetensors, or a name on the Hugging "
        "Face Hub: owner/name or owner/name@revision; or DIR by itself.",
    )(command)
    return click.argument(
        "directory", required=False, type=click.Path(path_type=Path), metavar="[DIR]"
    )(command)


_OPTIONS = (
    checkpoint_options,
    count("--chunk-size", default=512, help="Most prompt tokens of a request in one step."),
    click.option(
        "--kv-cache",
        default="fp8",
        show_default=True,
        type=click.Choice(list(CACHE_FORMATS)),
        help="Cache rows: DeepSeek-V4's FP8 records, these with index keys or compressed entries "
        "in 4 bits, V4.1's own (nvfp4), or plain rows.",
    ),
    device_option,
    dtype_option,
    click.option(
        "--backend", metavar="NAME", help="Backend asked of every operation; default: the best."
    ),
    all_reduce_option,
    threads_option("-t", text="CPU threads; default: as many as the model's size pays for."),
)


def run_options(
    function: Callable[..., None], *, unless: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Add the options to a command, which receives them as one ``RunOptions`` named ``run``.

    Args:
        function: command to decorate.
        unless: names of parameters any of which makes the checkpoint optional; without a checkpoint
            ``run`` is None then.
    """
    names = [field.name for field in dataclasses.fields(RunOptions)]

    @functools.wraps(function)
    def command(**parameters: Any) -> None:
        if parameters["checkpoint"] is None:
            if not any(parameters[name] is not None for name in unless):
                raise click.UsageError("Missing option '--checkpoint DIR', or DIR by itself.")
            rest = {name: value for name, value in parameters.items() if name not in names}
            function(run=None, **rest)
            return
        with bad_input():
            parameters["device"] = str(named_device(parameters["device"]))
        run = RunOptions(**{name: parameters.pop(name) for name in names})
        run.check()
        with bad_input():
            run = dataclasses.replace(run, checkpoint=local_checkpoint(run.checkpoint))
        with as_one(local_device(run.device)):
            function(run=run, **parameters)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextlib.contextmanager
def as_one(device: torch.device) -> Iterator[Ranks]:
    """Join torchrun's other processes; only the first prints, but all show errors."""
    with joined(device) as ranks, contextlib.ExitStack() as silence:
        if ranks.rank:
            nowhere = silence.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
        yield ranks


def json_option(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make the ``--json FILE`` option; the file's directory must exist before anything runs."""
    return click.option(
        "--json",
        "json_file",
        required=required,
        type=OutputFile(allow_dash=True),
        metavar="FILE",
        help='Write the result here; "-" prints it in place of the text.',
    )
