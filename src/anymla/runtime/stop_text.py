"""Streaming text that ends before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from anymla.model.tokenizer import TextStream


class StopText:
    """Turns tokens into text, and ends it before a stop string.

    Text that may begin a stop string is held back until it is known not to.

    Attributes:
        stopped: True once a stop string has come.
        tokens: number of tokens read, the one that completed the stop string included.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        """Start with empty text.

        Args:
            stream: text stream of the tokenizer.
            stop: stop strings, none of them empty.

        Raises:
            ValueError: a stop string is empty, which would stop everything.
        """
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._stream = stream
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.tokens = 0

    def push(self, token: int) -> str:
        """Return the text that this token makes certain; "" after a stop string."""
        if self.stopped:
            return ""
        self.tokens += 1
        return self._emit(self._stream.push(token))

    def finish(self) -> str:
        """Return the rest of the text at the end."""
        if self.stopped:
            return ""
        rest = self._emit(self._stream.finish())
        held, self._held = self._held, ""
        return rest + held

    def _emit(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that is a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
