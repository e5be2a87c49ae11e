"""Ends of a command: errors of the system or the user are one line, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator

import click

from anymla.cli.bad_input import BadInput, MachineFailed, of_file
from anymla.cli.terminal import one_line

# Exit codes that shells report for a process ended by SIGINT or SIGPIPE.
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13


def never_fail_to_print() -> None:
    """Show "?" for characters that the output's encoding lacks."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def on_terminal() -> bool:
    """True if a user may watch progress bars, which are drawn on stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def manners() -> Iterator[None]:
    """Convert errors that are no fault of this package to a line on stderr and an exit code.

    If the reader of the output has gone, the command ends silently, at Ctrl-C with 130. Files, text
    that is not UTF-8, too deep nesting, missing modules and too little memory are one line.
    Commands decide which ValueErrors concern their input (``bad_input``). Any other exception is a
    fault of this package and keeps its traceback.
    """
    try:
        try:
            yield
        finally:
            _flush()
            _close_notice()
    except (click.exceptions.Exit, click.Abort):
        raise
    except click.ClickException as error:
        if _is_help(error):
            raise
        error.__dict__["message"] = one_line(error.message)  # click declares it final
        raise
    except KeyboardInterrupt:
        click.echo(err=True)  # ends the line of a progress bar, and the terminal's ^C
        raise click.exceptions.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            _drop_output()
            raise click.exceptions.Exit(PIPE_CLOSED) from None
        raise _of_file(error) from error
    except UnicodeError as error:
        raise BadInput(f"not UTF-8: {error}") from error
    except RecursionError as error:
        raise BadInput("the input is nested too deeply") from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "anymla":
            raise
        raise BadInput(f"this installation has no module {error.name}") from error
    except (MemoryError, RuntimeError) as error:
        said = _of_machine(error)
        if said is None:
            raise
        raise said from error


def _is_help(error: click.ClickException) -> bool:
    """True if the message is a command's help, which is not one line but formatted."""
    context = getattr(error, "ctx", None)
    return context is not None and error.message == context.get_help()


def _close_notice() -> None:
    """Report kernel compilation times that no engine has reported."""
    notice = sys.modules.get("anymla.ops.compile_notice")
    if notice is not None:
        notice.NOTICE.close()


def _flush() -> None:
    """Write pending output now, so that a failure is raised here and not at Python's end."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard stdout's pending output, which Python would try to write at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_file(error: OSError) -> BadInput:
    if error.filename is None and _while_printing(error):
        _drop_output()
        error.filename = "standard output"
    return of_file(error)


def _while_printing(error: OSError) -> bool:
    """True if the error came from a standard stream, which the error itself does not say."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").split(".")[0] in ("click", "tqdm") or (
        frame.f_code is _flush.__code__
    )


def _of_machine(error: Exception) -> BadInput | None:
    """Describe what the machine lacks, a backend or memory; None for other errors."""
    from anymla.ops.memory import ran_out
    from anymla.ops.registry import BackendUnavailable

    if isinstance(error, BackendUnavailable):
        return BadInput(error)
    if ran_out(error):
        return MachineFailed(str(error).split("\n")[0] or "out of memory")
    return None
