"""vLLM with an audit, right and with each fault: ``audited.py CHECKPOINT ANSWER.json``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.forward_context import get_forward_context

from anymla.audit.rows import RowRecorder
from anymla.engines.vllm.audit.sample import Sample

NEW_TOKENS = 4  # of the longer prompt, an entry of four tokens is completed meanwhile


class Captured(RowRecorder):
    """A recorder that takes every step for a graph that is being captured, and replayed.

    All layers note, launches are put off as in a graph, and caches are read when the step has run.
    """

    captured = True  # type: ignore[assignment]


class Probe:
    """What is asked of a worker."""

    def anymla_break(self, name: str) -> None:
        """Put a fault in; the model under the hooks has it, not the hooks."""
        from faults import FAULTS

        self._undo = FAULTS[name](self.model_runner.get_model())

    def _audit(self) -> Any:
        return self.model_runner.get_model().anymla_audit

    def anymla_as_in_graphs(self) -> None:
        """From now on look at steps as at a graph's: chosen, and ended, by the runner."""
        hooks, inner = self._audit(), self.model_runner.get_model().model
        hooks._recorder.__class__ = Captured
        forward, known = inner.forward, self.model_runner.input_batch.num_computed_tokens_cpu

        def run(input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = get_forward_context().attn_metadata
            if hooks.auditor.active and isinstance(metadata, dict):
                first = next(each for each in metadata.values() if hasattr(each, "query_start_loc"))
                starts = first.query_start_loc_cpu.numpy()
                batch = SimpleNamespace(
                    num_reqs=len(starts) - 1,
                    num_tokens=int(starts[-1]),
                    query_start_loc_np=starts,
                    num_computed_tokens_np=known,
                    req_ids=hooks.request_ids,
                )
                hooks.begin_batch(batch, exact=True)
            result = forward(input_ids, positions, *args, **kwargs)
            hooks.end(metadata)
            return result

        inner.forward = run

    def anymla_break_audit(self) -> None:
        """Have the audit itself fail wherever it takes a case."""

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a fault of the audit")

        Sample.plan = fail  # type: ignore[method-assign]

    def anymla_found(self) -> dict[str, Any]:
        """What was found since the last time; the fault is taken out."""
        auditor = self._audit().auditor
        auditor.drain()
        alarms = [
            {"method": f.method, "layer": c.layer, "request": c.requests[f.token], "what": f.what}
            for c, f in auditor.alarms
        ]
        found = {
            "summary": auditor.summary(),
            "skipped": auditor.skipped,
            "tallies": {n: dataclasses.asdict(t) for n, t in auditor.tallies.items()},
            "alarms": alarms,
        }
        auditor.alarms.clear()
        auditor.tallies.clear()
        if hasattr(self, "_undo"):
            self._undo()
            del self._undo
        return found


def run(checkpoint: str) -> dict[str, Any]:
    """What the audit says of a healthy engine, and of one with each fault."""
    from faults import FAULTS
    from inputs import prompt_of
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, max_model_len=4096, max_num_seqs=4, worker_extension_cls="audited.Probe", seed=0
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in (40, 2150)]
    llm.collective_rpc("anymla_found")  # what the start of the engine gave
    answer: dict[str, Any] = {}
    for name in ("healthy", *FAULTS):
        if name != "healthy":
            llm.collective_rpc("anymla_break", args=(name,))
        llm.generate(prompts, sampling, use_tqdm=False)
        answer[name] = llm.collective_rpc("anymla_found")[0]
    llm.collective_rpc("anymla_as_in_graphs")
    for name in ("healthy", *FAULTS):
        if name != "healthy":
            llm.collective_rpc("anymla_break", args=(name,))
        llm.generate(prompts, sampling, use_tqdm=False)
        answer[f"{name}, in graphs"] = llm.collective_rpc("anymla_found")[0]
    llm.collective_rpc("anymla_break_audit")
    made = llm.generate(prompts, sampling, use_tqdm=False)
    answer["audit broken"] = llm.collective_rpc("anymla_found")[0]
    answer["audit broken"]["tokens"] = [len(each.outputs[0].token_ids) for each in made]
    return answer


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(sys.argv[1])))
