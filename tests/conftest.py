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


@pytest.hookimpl(tryfirst=True)  # before "-m" selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt, and skip those that this machine cannot run."""
    slow = set(SLOW.read_text(encoding="utf-8").splitlines()) if SLOW.exists() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    whole = [Path(argument).resolve() for argument in config.args] == [SLOW.parent]
    gone = slow - {item.nodeid for item in items}
    if whole and gone:
        raise pytest.UsageError(f"{SLOW.name} names tests that are gone: {', '.join(sorted(gone))}")
    skip_elsewhere(items)
