"""A report on a device by this package, in one file that can be sent."""

from __future__ import annotations

import subprocess
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click
from tqdm import tqdm

from anymla.child_process import python_command
from anymla.cli.terminal import one_line
from anymla.formats.files import naming

# Time limit of a conformance case, which includes a kernel's first compilation.
_SECONDS_A_CASE = 600
_POLL_S = 0.5
# Bytes at the end of a log that are read, and characters of a line that are shown.
_TAIL, _SHOWN = 4096, 160
# Purpose of each command, by its first word.
_PURPOSES = {
    "doctor": "this machine, and its backends: ten seconds, or minutes of compiling kernels",
    "conformance": "every known bug, a case each: half a minute, or minutes of compiling kernels",
    "bench": "times of all kernels: ten minutes or more",
}


def report_steps(device: str) -> list[list[str]]:
    """Return the commands whose results a report contains, each as the words after ``anymla``.

    Args:
        device: type of the device: cpu, cuda or xpu.
    """
    backend = "torch" if device == "cpu" else "triton"
    cases = f"--backend {backend} --jobs 1 --timeout {_SECONDS_A_CASE} --json conformance.jsonl"
    steps = [
        f"doctor --device {device} --json doctor.json",
        f"conformance --device {device} {cases}",
    ]
    if device != "cpu":
        steps.append("bench run all --json gpu.jsonl")
    return [step.split() for step in steps]


def write_report(file: Path, steps: Sequence[Sequence[str]]) -> bool:
    """Run commands, whatever the outcome of each, and zip their results.

    Each is a process of its own, so that a fault of the device ends only one of them. In addition
    to the results the file has their output (``1-doctor.log`` and so on) and exit codes
    (``steps.txt``).

    Args:
        file: path of the zip, which is replaced when all have run.
        steps: words after ``anymla``; files that they write are names without a directory.

    Returns:
        True if all ended with exit code 0.
    """
    codes, lines = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, words in enumerate(steps, 1):
            command = f"anymla {' '.join(words)}"
            click.echo(f"{number} of {len(steps)}: {command}\n  {_PURPOSES[words[0]]}", err=True)
            began = time.perf_counter()
            codes.append(_run(words, folder, folder / f"{number}-{words[0]}.log"))
            took = f"{time.perf_counter() - began:.0f} s"
            click.echo(f"  {took}, exit code {codes[-1]}", err=True)
            lines.append(f"{codes[-1]} {command}  # {took}\n")
        (folder / "steps.txt").write_text("".join(lines), encoding="utf-8")
        with naming(file), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for each in sorted(folder.iterdir()):
                archive.write(each, each.name)
    size = file.stat().st_size / 1000
    click.echo(f"{file}: {size:.0f} kB; docs/your-own-gpu.md says where to send it", err=True)
    return not any(codes)


def _run(words: Sequence[str], folder: Path, log: Path) -> int:
    """Run a command in a folder; a terminal shows its last printed line, and the time."""
    with (
        log.open("wb") as output,
        tqdm(bar_format="  {elapsed}  {desc}", disable=None, leave=False) as bar,
        subprocess.Popen(
            python_command("-m", "anymla", *words),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                bar.set_description_str(_last_line(log))


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        said = file.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
    return one_line(next((line for line in reversed(said) if line.strip()), ""), _SHOWN)
