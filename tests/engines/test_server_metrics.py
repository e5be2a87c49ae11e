"""Counters of workers, where there is nobody to collect them; with vLLM: test_vllm_served_audit."""

import logging
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from anymla.audit.auditor import Auditor
from anymla.audit.settings import Settings
from anymla.engines import server_metrics


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (server_metrics.DIRECTORY, server_metrics.MULTIPROCESS):
        monkeypatch.delenv(name, raising=False)
    server_metrics.counters.cache_clear()


@pytest.fixture
def _absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prometheus_client`` cannot be imported."""
    for name in [each for each in sys.modules if each.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)


@pytest.mark.usefixtures("_absent")
def test_without_the_package_nothing_is_shared_or_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server_metrics.share.__wrapped__()
    assert server_metrics.DIRECTORY not in os.environ
    monkeypatch.setenv(server_metrics.DIRECTORY, str(tmp_path))
    auditor = Auditor(Settings(every=1), logging.getLogger("audit"), {})
    server_metrics.count_audit(auditor)
    server_metrics.count_compiled()
    auditor.begin()
    auditor.end(1)
    assert auditor.audited == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_counted_where_nobody_collects() -> None:
    assert server_metrics.counters() is None


@pytest.mark.parametrize("why", ["several servers share a folder", "a child"])
def test_a_folder_is_made_by_a_single_server_alone(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if why == "a child":
        monkeypatch.setattr(multiprocessing, "parent_process", object)
    else:
        monkeypatch.setenv(server_metrics.MULTIPROCESS, str(tmp_path))
    server_metrics.share.__wrapped__()
    assert server_metrics.DIRECTORY not in os.environ


def test_a_folder_that_has_gone_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(server_metrics.DIRECTORY, str(tmp_path / "gone"))
    assert server_metrics.counters() is None
