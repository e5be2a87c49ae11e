"""Judges cases in a process of its own, which shares no interpreter lock with the engine.

Run as ``python -m anymla.audit.process``: reads cases from stdin, each behind its length in eight
bytes, and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, BinaryIO

from anymla.audit.case import Case, from_bytes, to_bytes
from anymla.audit.checks import Finding, judge


class JudgeProcess:
    """A process that judges; it is started by the first case and ends with this one."""

    def __init__(self, threads: int = 2) -> None:
        """Nothing is started yet.

        Args:
            threads: that it computes with.
        """
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, case: Case) -> Finding:
        """What ``checks.judge`` says of a case with tensors on the CPU.

        Raises:
            ValueError: as ``checks.judge``.
            OSError: the process has ended; the next call starts another.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        text = to_bytes(case)
        process.stdin.write(len(text).to_bytes(8, "little"))
        process.stdin.write(text)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise OSError("the process that judges has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        answer["worst"], answer["mean"] = float(answer["worst"]), float(answer["mean"])
        return Finding(**answer)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        count = str(self._threads)
        few = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "CUDA_VISIBLE_DEVICES": ""}
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, "-m", "anymla.audit.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | few | {"PYTHONPATH": path},
        )


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    while size := source.read(8):
        text = source.read(int.from_bytes(size, "little"))
        try:
            answer: dict[str, Any] = dataclasses.asdict(judge(from_bytes(text)[0]))
            # JSON knows no infinity.
            answer["worst"], answer["mean"] = repr(answer["worst"]), repr(answer["mean"])
        except Exception as error:  # of one case; the next may be in order
            answer = {"error": f"{type(error).__name__}: {error}"}
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    os.nice(10)
    # What else prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)
