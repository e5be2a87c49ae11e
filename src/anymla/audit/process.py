"""Judges cases in a process of its own, which shares no interpreter lock with the engine.

Run as ``python -m anymla.audit.process``: it reads the cases of a step from stdin, as the engine's
process packed them, and answers with a line of JSON. The engine only copies bytes into a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from anymla.audit.checks import Finding, judge
from anymla.audit.packet import Packed
from anymla.child_process import python_command, same_modules

# Answer for a case: its finding, the reason why the check failed, or None if nothing was recorded.
Answer = Finding | str | None


def judge_here(packed: Packed) -> list[Answer]:
    """Return the answer of ``checks.judge`` for each case of a step."""
    answers: list[Answer] = []
    for case in packed.cases():
        try:
            answers.append(None if case is None else judge(case))
        except Exception as error:  # an error concerns one case only; the next may be in order
            answers.append(f"{type(error).__name__}: {error}")
    return answers


class JudgeProcess:
    """A judging process; the first case starts it, and it ends with this process."""

    def __init__(self, threads: int = 2) -> None:
        """Start nothing yet.

        Args:
            threads: number of threads that it computes with.
        """
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def __call__(self, packed: Packed) -> Sequence[Answer]:
        """Judge as ``judge_here`` does.

        Raises:
            OSError: the process has ended; the next call starts another.
        """
        if self._killed:
            raise OSError("the process that judges was ended")
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        # Both ends of the pipe are this program.
        words = pickle.dumps((packed.planned, packed.step, packed.marks))
        for size in (len(words), len(packed.block)):
            process.stdin.write(size.to_bytes(8, "little"))
        process.stdin.write(words)
        process.stdin.write(packed.block.numpy().data)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise OSError("the process that judges has ended")
        return [_read(each) for each in json.loads(line)]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def kill(self) -> None:
        """End the process at once, whatever it judges; a thread that waits for it gets OSError."""
        self._killed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        count = str(self._threads)
        few = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            python_command("-m", "anymla.audit.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | few | same_modules(),
            # A terminal's Ctrl-C is for the engine, which ends this process.
            start_new_session=True,
        )


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    while size := source.read(8):
        rest = int.from_bytes(source.read(8), "little")
        planned, step, marks = pickle.loads(source.read(int.from_bytes(size, "little")))
        block = torch.empty(rest, dtype=torch.uint8)
        view = block.numpy().data
        while rest:
            rest -= source.readinto(view[len(view) - rest :])  # type: ignore[attr-defined]
        answers = judge_here(Packed(planned, block, step, marks))
        sink.write(json.dumps([_written(each) for each in answers]).encode() + b"\n")
        sink.flush()


def _written(answer: Answer) -> Any:
    if not isinstance(answer, Finding):
        return answer
    words = dataclasses.asdict(answer)
    # JSON has no infinity.
    return words | {"worst": repr(answer.worst), "mean": repr(answer.mean)}


def _read(words: Any) -> Answer:
    if not isinstance(words, dict):
        return words
    return Finding(**words | {"worst": float(words["worst"]), "mean": float(words["mean"])})


if __name__ == "__main__":
    os.nice(10)
    # Other output must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)
