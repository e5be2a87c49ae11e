"""All that this package can say about a device, in one file that can be sent to somebody."""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click

from anymla.child_process import python_command
from anymla.formats.files import naming

# Of a conformance case: a kernel's first compilation is part of it.
_SECONDS_A_CASE = 600


def report_steps(device: str) -> list[list[str]]:
    """Commands whose results a report holds, each as the words behind ``anymla``.

    Args:
        device: cpu, cuda or xpu.
    """
    backend = "torch" if device == "cpu" else "triton"
    cases = f"--backend {backend} --jobs 1 --timeout {_SECONDS_A_CASE} --json conformance.jsonl"
    steps = [
        f"doctor --device {device} --json doctor.json",
        f"conformance --device {device} {cases}",
    ]
    if device != "cpu":
        steps.append("bench gpu --json gpu.jsonl")
    return [step.split() for step in steps]


def write_report(file: Path, steps: Sequence[Sequence[str]]) -> bool:
    """Run commands, whatever becomes of each, and put what they leave into a zip.

    Each is a process of its own, so that a fault of the device ends one of them alone. Beside
    their results the file has what they print (``1-doctor.log`` and so on) and their exit codes
    (``steps.txt``).

    Args:
        file: the zip to be, which is replaced when all have run.
        steps: words behind ``anymla``; files they write are names without a directory.

    Returns:
        Whether all ended with exit code 0.
    """
    codes = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, words in enumerate(steps, 1):
            click.echo(f"anymla {' '.join(words)}")
            with (folder / f"{number}-{words[0]}.log").open("wb") as log:
                done = subprocess.run(
                    python_command("-m", "anymla", *words),
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            codes.append(done.returncode)
            click.echo(f"  exit code {done.returncode}")
        lines = [
            f"{code} anymla {' '.join(words)}\n" for code, words in zip(codes, steps, strict=True)
        ]
        (folder / "steps.txt").write_text("".join(lines), encoding="utf-8")
        with naming(file), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for each in sorted(folder.iterdir()):
                archive.write(each, each.name)
    return not any(codes)
