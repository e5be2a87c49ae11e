"""Entry point of the group ``vllm.general_plugins``; vLLM calls it in each of its processes."""

from __future__ import annotations

import logging
import multiprocessing

from anymla.engines.vllm import report
from anymla.engines.vllm.pinned import installed_version

_MODEL = "anymla.engines.vllm.model"
_SHARED_MODEL = "anymla.engines.vllm.v41_model"


def register() -> None:
    """Register anymla's models in place of vLLM's, without imports or initialisation.

    May be called again, in any process. Nothing is replaced in a vLLM that is not admitted, or that
    lacks a seam of the plugin.
    """
    chosen = report.mode()
    if chosen == "off":
        return
    if refused := report.refusal(installed_version()):
        _say(logging.WARNING, f"anymla replaces nothing: {refused}")
        return
    machine = report.this_machine()
    _register_v41(machine, chosen)
    parts = report.plan(machine, chosen)
    if refused := report.refusal_by_source(machine, parts):
        _say(logging.WARNING, f"anymla replaces nothing: {refused}")
        return
    replaced = {part.name for part in parts if part.replaced}
    if not replaced and not report.audited():
        for line in report.lines(machine, parts):
            _say(logging.INFO, line)
        return
    if report.audited() or report.watched():
        from anymla.engines import server_metrics  # imports torch

        server_metrics.share()
    from vllm import ModelRegistry

    ModelRegistry.register_model("DeepseekV4ForCausalLM", f"{_MODEL}:AnymlaDeepseekV4")
    if report.DRAFT_MODEL in replaced:
        ModelRegistry.register_model("DeepSeekV4MTPModel", f"{_MODEL}:AnymlaDeepseekV4Draft")
        ModelRegistry.register_model("DSparkDraftModel", f"{_MODEL}:AnymlaDeepseekV4DSpark")


def _register_v41(machine: report.Machine, chosen: str) -> None:
    """Register DeepSeek-V4.1's model, for which seams may be missing independently."""
    parts = report.v41_plan(machine, chosen)
    if not any(part.replaced for part in parts):
        for line in report.lines(machine, parts, report.V41):
            _say(logging.INFO, line)
        return
    if refused := report.v41_refusal_by_source(machine, parts):
        _say(logging.WARNING, f"anymla replaces nothing of {report.V41}: {refused}")
        return
    from vllm import ModelRegistry

    ModelRegistry.register_model("DeepseekV41ForCausalLM", f"{_SHARED_MODEL}:AnymlaDeepseekV41")


def _say(level: int, line: str) -> None:
    """Write to vLLM's log, but not in every worker."""
    if multiprocessing.parent_process() is None:
        logging.getLogger("vllm.plugins.anymla").log(level, line)
