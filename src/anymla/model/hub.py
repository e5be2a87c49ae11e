"""Lookup and download of a checkpoint by its name on the Hugging Face Hub.

A name is ``owner/name``, or ``owner/name@revision`` with a branch, a tag or a commit. A directory
of that name comes first, then a snapshot in the Hub's cache, and only then the network. Only files
of the checkpoint are downloaded, and no code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anymla.formats.untrusted import Refused, read_object
from anymla.model.checkpoint import INDEX_FILE, SINGLE_FILE
from anymla.model.config_fields import ConfigError

_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Only a repository's top level: folders hold code, and weights in other layouts.
_DESCRIBING = ("*.json", "*.jinja")
_WEIGHTS = "*.safetensors"
_IGNORED = ("*/*",)


def local_checkpoint(source: str | Path, *, weights: bool = True) -> Path:
    """Resolve a directory or a name on the Hub to a directory of this machine.

    Args:
        source: path of a directory, or ``owner/name`` or ``owner/name@revision``.
        weights: True to download missing weights as well; False for the descriptive files only.

    Returns:
        The directory; ``source`` itself if it exists, or is no possible name on the Hub.

    Raises:
        ConfigError: the checkpoint is not here and cannot be downloaded; the message is one line
            with the command that would help.
    """
    path, named = Path(source), _NAME.fullmatch(str(source))
    if named is None or path.exists():
        return path
    name, revision = named["name"], named["revision"]
    missing = f"{source}: no such directory, and "
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{missing}checkpoints of the Hub need huggingface_hub: pip install huggingface-hub"
        ) from None
    wanted = [*_DESCRIBING, _WEIGHTS] if weights else [*_DESCRIBING]
    found = _snapshot(name, revision, wanted, fetch=False)
    if isinstance(found, Path) and _is_complete(found, weights=weights):
        return found
    found = _snapshot(name, revision, wanted, fetch=True)
    if isinstance(found, Path) and _is_complete(found, weights=weights):
        return found
    if isinstance(found, Path):
        raise ConfigError(f"{missing}{_incomplete(found, name, revision, weights=weights)}")
    raise ConfigError(f"{missing}{found}")


def _snapshot(name: str, revision: str | None, wanted: list[str], *, fetch: bool) -> Path | str:
    """Return a snapshot with the wanted files, or the reason why there is none."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=list(_IGNORED),
                local_files_only=not fetch,
            )
        )
    except errors.GatedRepoError:
        return f"{name} is gated on the Hub: accept its terms there, then: hf auth login"
    except errors.RepositoryNotFoundError:
        return f"the Hub has no repository {name}, or a private one: hf auth login"
    except errors.RevisionNotFoundError:
        return f"the Hub's {name} has no revision {revision}"
    except errors.LocalEntryNotFoundError:
        return f"not in the Hub's cache; with a network: {_command(name, revision)}"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        return f"it cannot be fetched: {_first_line(error)}"
    # the library's HTTP client, and so its exceptions, differ between versions
    except Exception as error:
        if not fetch:
            return f"its snapshot cannot be read: {_first_line(error)}"
        return f"it cannot be fetched: {type(error).__name__}: {_first_line(error)}"


def _is_complete(directory: Path, *, weights: bool) -> bool:
    return not _absent(directory, weights=weights)


def _absent(directory: Path, *, weights: bool) -> list[str]:
    """Return the files that a snapshot lacks, for example after an interrupted download."""
    if not (directory / "config.json").is_file():
        return ["config.json"]
    if not weights or (directory / SINGLE_FILE).is_file():
        return []
    try:
        placed: Any = read_object(directory / INDEX_FILE)["weight_map"]
        files = sorted({str(file) for file in placed.values()})
    except (OSError, Refused, KeyError, AttributeError):
        return [INDEX_FILE]
    return [file for file in files if not (directory / file).is_file()]


def _incomplete(directory: Path, name: str, revision: str | None, *, weights: bool) -> str:
    absent = _absent(directory, weights=weights)
    more = f" and {len(absent) - 1} more files" if len(absent) > 1 else ""
    return (
        f"the snapshot in {directory} lacks {absent[0]}{more}; with a network: "
        f"{_command(name, revision)}"
    )


def _command(name: str, revision: str | None) -> str:
    at = f" --revision {revision}" if revision else ""
    return f"hf download {name}{at} --include '*.json' '*.jinja' '*.safetensors'"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
