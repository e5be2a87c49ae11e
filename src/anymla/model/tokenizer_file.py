"""Reader of the part of ``tokenizer.json`` that belongs to the tokenizer, within bounds.

The file may also hold state of the run that wrote it. Truncation and padding are for batches of a
training run, and BPE dropout makes encodings random. None of them belongs to the tokenizer, and
transformers and vLLM ignore truncation and padding as well.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from anymla.formats.foreign_files import why_no_checkpoint
from anymla.formats.untrusted import Refused, parse_object, read_bytes
from anymla.model.tokenizer_config import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
# A limit several times the size of the largest known tokenizers (Gemma 3: 33 MB, 262,144 tokens).
_MOST_BYTES = 64 << 20
_MOST_TOKENS = 1 << 20
_MOST_MERGES = 1 << 21
_MOST_ADDED, _MOST_ADDED_BYTES = 1 << 16, 1 << 20
# Characters that normalisation may make of one, and tokens that may be put around a text.
_MOST_GROWTH, _MOST_AROUND = 64, 16

_T = TypeVar("_T")


def read_tokenizer(directory: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Read the library's tokenizer from a checkpoint's directory, and the object in its file.

    Raises:
        TokenizerError: ``tokenizer.json`` is absent, cannot be read, or exceeds every model's
            needs: it is too large, or has rules that inflate their input.
    """
    path = Path(directory) / TOKENIZER_FILE
    try:
        held = read_bytes(path, _MOST_BYTES)
        fields = parse_object(held, wide=True)
    except FileNotFoundError:
        why = why_no_checkpoint(Path(directory))
        raise TokenizerError(f"{directory}: has no tokenizer.json{why}") from None
    except (OSError, Refused) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None
    _check_sizes(path, fields)
    with library_errors(f"{path}: cannot be read"):
        inner = tokenizers.Tokenizer.from_buffer(held)
        around = inner.num_special_tokens_to_add(is_pair=False)
    if around > _MOST_AROUND:
        raise TokenizerError(f"{path}: its post-processor puts {around} tokens around a text")
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None) is not None:
        inner.model.dropout = None
    return inner, fields


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Convert the library's errors to ``TokenizerError``: bare Exceptions, and Rust's panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TokenizerError(f"{what}: {reason}") from None


def within(seconds: float, work: Callable[[], _T], late: str) -> _T:
    """Return the result of work that cannot be interrupted, if it comes in time.

    Late work goes on in a thread whose result is dropped.

    Args:
        seconds: time limit in seconds.
        work: function that releases the interpreter lock while it runs.
        late: text of the error for late work.

    Raises:
        TokenizerError: the work is late.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # includes Rust's panics; raised again in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, name="anymla-tokenizer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TokenizerError(late)
    return results[0]


def _check_sizes(path: Path, fields: dict[str, Any]) -> None:
    """Raise TokenizerError for sizes that take much time or memory to load or to use."""
    model, added = fields.get("model"), fields.get("added_tokens")
    if isinstance(model, dict):
        for name, most in (("vocab", _MOST_TOKENS), ("merges", _MOST_MERGES)):
            count = len(held) if isinstance(held := model.get(name), (dict, list)) else 0
            if count > most:
                raise TokenizerError(f"{path}: its {name} has {count} entries, at most {most}")
    if isinstance(added, list):
        texts = [each.get("content") for each in added if isinstance(each, dict)]
        size = sum(len(text.encode()) for text in texts if isinstance(text, str))
        if len(added) > _MOST_ADDED or size > _MOST_ADDED_BYTES:
            raise TokenizerError(
                f"{path}: its {len(added)} added tokens have {size} bytes, "
                f"at most {_MOST_ADDED} of {_MOST_ADDED_BYTES} bytes are read"
            )
    if (growth := _growth(fields.get("normalizer"))) > _MOST_GROWTH:
        raise TokenizerError(
            f"{path}: its normalizer can make {growth:.6g} characters of one, "
            f"at most {_MOST_GROWTH} are allowed"
        )


def _growth(normalizer: Any) -> float:
    """Return the most characters that a normaliser makes of one, Unicode's own forms excluded."""
    if not isinstance(normalizer, dict):
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        parts = normalizer.get("normalizers")
        return math.prod(map(_growth, parts)) if isinstance(parts, list) else 1
    if kind == "Prepend":
        return 1 + len(str(normalizer.get("prepend", "")))
    if kind == "Replace":
        content = len(str(normalizer.get("content", "")))
        pattern = normalizer.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # A pattern may match the empty string between any two characters.
        return max(1, content / len(text)) if isinstance(text, str) and text else 1 + content
    if kind == "Precompiled":
        return math.inf  # its table decides, which is not read here
    return 1
