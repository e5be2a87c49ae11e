"""Entry point of the group ``vllm.general_plugins``; vLLM calls it in each of its processes."""

from __future__ import annotations

import logging
import multiprocessing

from anymla.engines.vllm import report
from anymla.engines.vllm.pinned import installed_version

_MODEL = "anymla.engines.vllm.model"


def register() -> None:
    """Name anymla's models in place of vLLM's; nothing is imported or initialised yet.

    May be called again, in any process. An untested vLLM is left alone.
    """
    chosen = report.mode()
    if chosen == "off":
        return
    refused = report.refusal(installed_version())
    if refused:
        if multiprocessing.parent_process() is None:  # once, not in every worker as well
            logging.getLogger("vllm.plugins.anymla").warning("anymla replaces nothing: %s", refused)
        return
    from vllm import ModelRegistry

    replaced = {part.name for part in report.plan(report.this_machine(), chosen) if part.replaced}
    if report.ATTENTION in replaced:
        ModelRegistry.register_model("DeepseekV4ForCausalLM", f"{_MODEL}:AnymlaDeepseekV4")
    if report.DRAFT_MODEL in replaced:
        ModelRegistry.register_model("DeepSeekV4MTPModel", f"{_MODEL}:AnymlaDeepseekV4Draft")
