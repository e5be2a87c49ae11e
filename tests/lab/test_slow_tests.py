"""Which tests are left to ``make test-all``."""

from lab.slow_tests import KEPT, durations, slow

LOG = """
..... [100%]
12.00s call     tests/a.py::test_long
0.50s setup    tests/a.py::test_b[x]
1.00s call     tests/a.py::test_b[x]
2.00s call     tests/a.py::test_b[y]
3.00s call     tests/a.py::test_b[z and w]
0.40s call     tests/a.py::test_b[v]
9.00s call     tests/a.py::test_c
"""


def test_phases_add_up():
    found = durations(LOG.splitlines())
    assert found["tests/a.py::test_b[x]"] == 1.5
    assert found["tests/a.py::test_b[z and w]"] == 3
    assert len(found) == 6


def test_long_ones_and_two_of_three_parameter_sets_are_left_out():
    left = set(slow(durations(LOG.splitlines())))
    assert left == {
        "tests/a.py::test_long", "tests/a.py::test_b[y]", "tests/a.py::test_b[z and w]",
    }  # fmt: skip


def test_what_nothing_else_notices_stays():
    assert not list(slow(dict.fromkeys(KEPT, 100.0)))
