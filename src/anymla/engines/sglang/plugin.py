"""Entry point of the group ``sglang.srt.plugins``; SGLang calls it in each of its processes."""

from __future__ import annotations

import logging
import multiprocessing

from anymla.engines.sglang import report
from anymla.engines.sglang.pinned import installed_version

_LOG = logging.getLogger("sglang.plugins.anymla")


def register() -> None:
    """Register anymla's hooks with SGLang, which applies them when all plugins have run.

    Nothing is replaced in an SGLang that is not admitted or that lacks a seam of the plugin.
    Faults end in the log, as SGLang does with those of its plugins: a wrong value of the
    environment variable included.
    """
    try:
        words = report.chosen()
    except ValueError as error:
        _say(logging.ERROR, f"anymla replaces nothing: {error}")
        return
    if words == {"off"}:
        return
    if refused := report.refusal(installed_version()):
        _say(logging.WARNING, f"anymla replaces nothing: {refused}")
        return
    machine = report.this_machine()
    parts = report.plan(machine, words)
    names = [part.name for part in parts if part.replaced]
    audited = report.AUDIT in words
    if refused := report.refusal_by_source(names + [report.AUDIT] * audited):
        _say(logging.WARNING, f"anymla replaces nothing: {refused}")
        return
    if report.ATTENTION in names:
        from anymla.engines.sglang import attention

        attention.register()
    if report.INDEXER in names:
        from anymla.engines.sglang import indexer

        indexer.register()
    if audited:
        from anymla.engines.sglang import audit

        audit.register()
    for part in parts:
        action = "replaced" if part.replaced else "kept"
        _say(logging.INFO, f"anymla on {machine}: {part.name} {action} ({part.why})")
    if not names and not audited:
        _say(logging.WARNING, f"anymla replaces nothing on {machine}")


def _say(level: int, line: str) -> None:
    """Write to SGLang's log, but not in every worker."""
    if multiprocessing.parent_process() is None:
        _LOG.log(level, line)
