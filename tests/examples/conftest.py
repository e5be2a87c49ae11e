"""The modules of ``examples/tiny`` are imported from there."""

import pathlib
import sys

import pytest

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="session", autouse=True)
def _examples_can_be_imported():
    pytest.importorskip("triton")
    sys.path.insert(0, str(TINY))
    yield
    sys.path.remove(str(TINY))
