"""Settings of all tests: those of the package's plugin, and which tests are slow."""

from pathlib import Path

import pytest

from anymla.testing.pytest_plugin import (  # noqa: F401
    inference_rules,
    pytest_addoption,
    pytest_configure,
)
from anymla.testing.pytest_plugin import pytest_collection_modifyitems as skip_elsewhere

SLOW = Path(__file__).with_name("slow.txt")
# See the fixture ``gone``.
GONE = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before "-m" selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt, and skip those that this machine cannot run."""
    slow = set(SLOW.read_text(encoding="utf-8").splitlines()) if SLOW.exists() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    whole = [Path(argument).resolve() for argument in config.args] == [SLOW.parent]
    gone = slow - {item.nodeid for item in items}
    config.stash[GONE] = sorted(gone) if whole else []
    skip_elsewhere(items)


@pytest.fixture
def gone(pytestconfig: pytest.Config) -> list[str]:
    """Tests that slow.txt names and that do not exist; none if only some tests were collected."""
    return pytestconfig.stash[GONE]
