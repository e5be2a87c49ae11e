"""``python -m crossrun.ptx sm_80 COMMAND...``: run a command as an older NVIDIA target.

Every Python process of the command executes Triton's kernels as that target, workers of an engine
included.
"""

from __future__ import annotations

import os
import sys

from crossrun.ptx import TARGETS, environment

_USAGE = f"usage: python -m crossrun.ptx {{{','.join(TARGETS)}}} COMMAND..."


def main(words: list[str]) -> int:
    """Replace this process by the command; return 2 with a message if the words are wrong."""
    if len(words) < 2 or words[0] not in TARGETS:
        print(_USAGE, file=sys.stderr)
        return 2
    target, *command = words
    try:
        os.execvpe(command[0], command, os.environ | environment(target))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
