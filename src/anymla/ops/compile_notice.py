"""Lines on stderr about kernels that numba compiles: nobody should wait and not know why."""

from __future__ import annotations

import sys

from tqdm import tqdm

# Seconds of compilation that need no explanation where no terminal watches.
_PATIENCE = 3.0


class Notice:
    """Tells of compilations when they begin, and what they took when the caller's work is done.

    Attributes:
        patience: seconds of compilation before anything is said; without it at a terminal.
        kernels: compiled since the last ``close``.
        seconds: that they took.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self.patience = patience
        self.kernels = 0
        self.seconds = 0.0
        self._told = False

    def begin(self, kept: str) -> None:
        """Say once that kernels are being compiled, if somebody may wonder.

        Args:
            kept: the folder that keeps them for the next process; "" if none does.
        """
        if self._told or not (self._watched or self.seconds > self.patience):
            return
        self._told = True
        where = f"once, and kept in {kept}" if kept else "by every process: no cache can be written"
        if self._watched and sys.stdout is not None and sys.stdout.isatty():
            print(flush=True)  # text may be streamed in this line
        self._say(f"compiling kernels for this CPU, which can take half a minute ({where})")

    def add(self, seconds: float) -> None:
        """Count a kernel that has been compiled."""
        self.kernels += 1
        self.seconds += seconds

    def close(self) -> None:
        """Say what compilations have taken, if that they began was said or would have been."""
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
