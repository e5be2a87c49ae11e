"""Choose the tests that ``make test`` leaves to ``make test-all``, from recorded durations.

.venv/bin/python -m pytest -n auto --durations=0 --durations-min=0.3 > log
.venv/bin/python -m lab.slow_tests log > tests/slow.txt
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Seconds from which a test is left out, and from which two of three parameter sets of a test are.
LONG, SOME = 10.0, 1.2
# Tests that stay although they are long: they notice what nothing else does.
KEPT = (
    "tests/ops/test_pdl.py::test_every_program_waits_before_it_writes_or_ends",
    "tests/test_new_operation.py::test_its_tests_and_those_of_all_operations_pass",
    "tests/layers/test_ranks.py::test_two_processes_generate_what_one_does[mtp]",
    "tests/runtime/test_warm_up.py::test_traffic_compiles_nothing_new[mtp-sm_90]",
)
_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)")


def durations(log: Iterable[str]) -> dict[str, float]:
    """Read pytest's list of durations; return the seconds of each test."""
    found: dict[str, float] = collections.defaultdict(float)
    for line in log:
        match = _LINE.match(line)
        if match is not None:
            found[match[2].strip()] += float(match[1])
    return dict(found)


def slow(seconds: dict[str, float]) -> Iterator[str]:
    """Yield the tests that are left out, by their ids.

    Args:
        seconds: duration of each test by its id.
    """
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for test in sorted(seconds):
        functions[test.partition("[")[0]].append(test)
    for tests in functions.values():
        some = [test for test in tests if SOME <= seconds[test] < LONG]
        spared = {*some[::3]} if len(some) >= 3 else {*some}
        for test in tests:
            left = seconds[test] >= LONG or (test in some and test not in spared)
            if left and test not in KEPT:
                yield test


def main(log: Path) -> None:
    """Print the list."""
    with log.open(encoding="utf-8") as lines:
        print("\n".join(sorted(slow(durations(lines)))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
