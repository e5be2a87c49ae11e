"""Steps without requests, as idle ranks of data parallel run them: ``idle.py ANSWER.json``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.v1.worker.gpu_model_runner as first

from anymla.audit.auditor import Auditor
from anymla.audit.settings import Settings
from anymla.engines.vllm.audit import runners


def scheduled(tokens: int, *finished: str) -> Any:
    """Stand for what vLLM's scheduler hands to a runner."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, finished_req_ids={*finished}, preempted_req_ids=None
    )


def main(answer: Path) -> None:
    """Run idle steps and others, with the hooks around vLLM's first runner."""
    active, forgotten = [], []
    auditor = Auditor(Settings(every=1), logging.getLogger("audit"), {}, [])

    def execute(self: Any, scheduler_output: Any) -> str:
        active.append(auditor.active)
        if scheduler_output.total_num_scheduled_tokens == 13:
            raise ValueError("a step that fails")
        return "ran"

    first.GPUModelRunner.execute_model = execute
    hooks: Any = SimpleNamespace(auditor=auditor)
    hooks.at_rest = SimpleNamespace(forget=lambda gone: forgotten.append(sorted(gone)))
    runners._wrap_runners(hooks)
    runner: Any = object.__new__(first.GPUModelRunner)
    results = [runner.execute_model(scheduled(tokens, f"r{tokens}")) for tokens in (0, 0, 3, 0)]
    try:
        runner.execute_model(scheduled(13))
    except ValueError as error:
        results.append(str(error))
    found = {"results": results, "active": active, "forgotten": forgotten}
    found |= {"steps": auditor.step, "audited": auditor.audited, "active now": auditor.active}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
