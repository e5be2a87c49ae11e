"""``python -m crossrun.ptx [--all-sms] sm_80 COMMAND...``: run a command as an older NVIDIA target.

Every Python process of the command executes Triton's kernels as that target, workers of an engine
included. ``--all-sms`` reports the GPU's own number of SMs, which an engine's compiled CUDA
operations may insist on.
"""

from __future__ import annotations

import os
import sys

from crossrun.ptx import TARGETS, environment

_ALL_SMS = "--all-sms"
_USAGE = f"usage: python -m crossrun.ptx [{_ALL_SMS}] {{{','.join(TARGETS)}}} COMMAND..."


def main(words: list[str]) -> int:
    """Replace this process by the command; return 2 with a message if the words are wrong."""
    all_sms = words[:1] == [_ALL_SMS]
    if all_sms:
        words = words[1:]
    if len(words) < 2 or words[0] not in TARGETS:
        print(_USAGE, file=sys.stderr)
        return 2
    target, *command = words
    try:
        os.execvpe(command[0], command, os.environ | environment(target, all_sms=all_sms))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
