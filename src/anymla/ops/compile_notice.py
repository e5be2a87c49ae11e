"""Messages on stderr about kernels that numba compiles, so that users know why they wait."""

from __future__ import annotations

import sys

from tqdm import tqdm

# Seconds of compilation that go unexplained if stderr is not a terminal.
_PATIENCE = 3.0


class Notice:
    """Announces compilations when they begin, and their time when the caller's work is done.

    Attributes:
        patience: seconds of compilation before a message; ignored at a terminal.
        kernels: number of kernels compiled since the last ``close``.
        seconds: time of those compilations.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self.patience = patience
        self.kernels = 0
        self.seconds = 0.0
        self._told = False

    def begin(self, kept: str) -> None:
        """Announce once that kernels are being compiled, if the user may be waiting for it.

        Args:
            kept: folder that keeps the compiled kernels for later processes; "" if there is none.
        """
        if self._told or not (self._watched or self.seconds > self.patience):
            return
        self._told = True
        where = f"once, and kept in {kept}" if kept else "by every process: no cache can be written"
        if self._watched and sys.stdout is not None and sys.stdout.isatty():
            print(flush=True)  # a partial line of streamed text may be on the terminal
        self._say(f"compiling kernels for this CPU, which can take half a minute ({where})")

    def add(self, seconds: float) -> None:
        """Count one compiled kernel and its seconds."""
        self.kernels += 1
        self.seconds += seconds

    def close(self) -> None:
        """Report what compilations took, if they were announced or exceeded ``patience``."""
        if self.kernels and (self._told or self.seconds > self.patience):
            self._say(f"{self.kernels} kernels compiled in {self.seconds:.1f} s")
        self.kernels, self.seconds = 0, 0.0

    @property
    def _watched(self) -> bool:
        return self.patience == _PATIENCE and sys.stderr is not None and sys.stderr.isatty()

    def _say(self, text: str) -> None:
        if sys.stderr is not None:
            tqdm.write(f"anymla: {text}", file=sys.stderr)


NOTICE = Notice()
