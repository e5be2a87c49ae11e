"""How a command ends: what the system or the user does to it is one line, or none."""

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

# As shells report a process that SIGINT or SIGPIPE has ended.
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13


def never_fail_to_print() -> None:
    """Show "?" for characters that the output's encoding lacks."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def on_terminal() -> bool:
    """Whether somebody may watch progress bars, which are drawn on stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def manners() -> Iterator[None]:
    """Turn what is no mistake of this package into a line on stderr and an exit code.

    A reader that has gone ends the command without a word, Ctrl-C with 130; files, text that is
    not UTF-8, too deep nesting, missing modules and too little memory are a line. Commands say
    themselves which ValueErrors are about their input (``bad_input``); any other exception is a
    mistake of this package and keeps its traceback.
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
        error.__dict__["message"] = one_line(error.message)  # click calls it final
        raise
    except KeyboardInterrupt:
        click.echo(err=True)  # a progress bar's line, and the terminal's ^C, end here
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
    """Say what kernels took to compile that no engine has told of."""
    notice = sys.modules.get("anymla.ops.compile_notice")
    if notice is not None:
        notice.NOTICE.close()


def _flush() -> None:
    """Let what could not be written fail here, not while Python ends."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Forget what stdout still holds, which Python would try to write once more at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_file(error: OSError) -> BadInput:
    if error.filename is None and _while_printing(error):
        _drop_output()
        error.filename = "standard output"
    return of_file(error)


def _while_printing(error: OSError) -> bool:
    """Whether it came from writing to a standard stream, which the error itself does not say."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").split(".")[0] in ("click", "tqdm") or (
        frame.f_code is _flush.__code__
    )


def _of_machine(error: Exception) -> BadInput | None:
    """What the machine lacks: a backend, or memory; None for other errors."""
    from anymla.ops.memory import ran_out
    from anymla.ops.registry import BackendUnavailable

    if isinstance(error, BackendUnavailable):
        return BadInput(error)
    if ran_out(error):
        return MachineFailed(str(error).split("\n")[0] or "out of memory")
    return None
