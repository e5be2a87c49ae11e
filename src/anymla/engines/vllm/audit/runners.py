"""Start of an audit: its judges, and vLLM's model runners, which tell it which steps there are."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from anymla import __version__
from anymla.audit.auditor import Auditor
from anymla.audit.process import JudgeProcess
from anymla.audit.settings import Settings
from anymla.engines import server_metrics
from anymla.engines.vllm.audit.hooks import Hooks
from anymla.engines.vllm.audit.method import LOG
from anymla.engines.vllm.pinned import installed_version

VARIABLE = "ANYMLA_AUDIT"


def start(model: nn.Module, runner_of_steps: bool = True) -> Hooks:
    """Audit a model that has been built, with the settings in the environment."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {
        "anymla": __version__,
        "vllm": installed_version() or "?",
        "torch": torch.__version__,
        "device": name,
    }
    settings = Settings.of(os.environ.get(VARIABLE, ""))
    judges = [JudgeProcess(2 if settings.judges == 1 else 1) for _ in range(settings.judges)]
    auditor = Auditor(settings, LOG, versions, judges)
    server_metrics.count_audit(auditor)
    hooks = Hooks(model, auditor)
    hooks.streams.wrap_functions()
    if runner_of_steps:
        _wrap_runners(hooks)
    LOG.info("audit: %s", auditor.settings)
    return hooks


def _wrap_runners(hooks: Hooks) -> None:
    """Let both of vLLM's model runners announce their steps.

    The second one knows enough on the CPU to choose tokens before a graph is replayed, and keeps
    the step's metadata. The first one's audited steps run without their graphs.
    """
    import vllm.v1.worker.gpu_model_runner as first

    runner = first.GPUModelRunner
    auditor = hooks.auditor

    @contextlib.contextmanager
    def step(scheduled: Any) -> Iterator[None]:
        gone = set(scheduled.finished_req_ids) | set(scheduled.preempted_req_ids or ())
        hooks.at_rest.forget(gone)
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            yield
            return
        auditor.begin()
        try:
            yield
        finally:
            auditor.end(tokens)

    execute = runner.execute_model
    batch = runner._determine_batch_execution_and_padding

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with step(scheduler_output):
            return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(batch)
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if auditor.active:
            kwargs["force_eager"] = True
            hooks.request_ids = list(self.input_batch.req_ids)
        return batch(self, *args, **kwargs)

    runner.execute_model = execute_model
    runner._determine_batch_execution_and_padding = determine
    if not torch.cuda.is_available():
        return

    import vllm.v1.worker.gpu.model_runner as second

    runner2 = second.GPUModelRunner
    execute2, prepare2 = runner2.execute_model, runner2.prepare_attn

    @functools.wraps(execute2)
    def execute_model2(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or len(args) > 1:
            return execute2(self, scheduler_output, *args, **kwargs)
        with step(scheduler_output):
            result = execute2(self, scheduler_output, *args, **kwargs)
            if auditor.active:
                state = self.execute_model_state
                hooks.end(None if state is None else state.attn_metadata)
            return result

    @functools.wraps(prepare2)
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        made = prepare2(self, input_batch)
        if auditor.active:
            with hooks.guarded("a step"):
                exact = getattr(self, "speculator", None) is None
                hooks.begin_batch(input_batch, exact=exact)
        return made

    runner2.execute_model = execute_model2
    runner2.prepare_attn = prepare_attn
