"""Runs the probes: which backend, how right, how fast."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import torch

from anymla.bench.doctor import attention_probes, cache_probes, layer_probes
from anymla.bench.doctor.clock import Ceilings, seconds_of, synchronize
from anymla.bench.doctor.trial import Probe, Trial
from anymla.ops.device import target_of
from anymla.ops.registry import Support
from anymla.runtime.threads import threads

NATIVE, SOFTWARE, FALLBACK, CANNOT = "native", "software FP8", "fallback", "cannot"
_GENERAL = ("torch", "reference")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one probe found.

    Attributes:
        family: of operations.
        label: what was called.
        operation: its name.
        backend: that ``backend=None`` takes; None if there is none.
        how: NATIVE, SOFTWARE (FP8 converted by integer operations), FALLBACK (a general backend on
            an accelerator) or CANNOT.
        why_not: by backend that ranks before the chosen one, why it was not.
        right: whether the result was what the oracle allows; None if it could not run.
        error: largest error as a share of what is allowed; 0 where bits are compared, None where
            bytes were only seen to fit.
        problem: what was wrong.
        us: microseconds of a call.
        gb_per_s: bytes that it must move over that time.
        tflop_per_s: operations that it must do over that time.
        share: least time by this machine's ceilings over that time.
        bound: the ceiling in question, "copy" or "product".
        tokens: of the timed call.
    """

    family: str
    label: str
    operation: str
    backend: str | None
    how: str
    why_not: dict[str, str]
    right: bool | None = None
    error: float | None = None
    problem: str = ""
    us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    share: float | None = None
    bound: str = ""
    tokens: int = 0


def all_probes() -> list[Probe]:
    """In the order in which a layer calls them."""
    return [*cache_probes.probes(), *attention_probes.probes(), *layer_probes.probes()]


def examine(probe: Probe, device: torch.device, ceilings: Ceilings | None) -> Finding:
    """Ask, check and time one probe; nothing is raised.

    Args:
        probe: what to call.
        device: where.
        ceilings: None to leave the timing out.
    """
    torch.manual_seed(0)
    # Few tokens: threads would wait for each other.
    with threads(1):
        finding = _checked(probe, device)
    if ceilings is None or not finding.right:
        return finding
    tokens = probe.tokens["cpu" if device.type == "cpu" else "gpu"]
    timed = probe.draw(tokens, device)
    try:
        return dataclasses.replace(finding, **_timed(timed, device, ceilings), tokens=tokens)
    except Exception as failure:
        problem = " ".join(f"not timed: {type(failure).__name__}: {failure}".split())
        return dataclasses.replace(finding, problem=problem)


def _checked(probe: Probe, device: torch.device) -> Finding:
    trial = probe.draw(probe.tokens["check"], device)
    picked, answers = trial.operation.explain(*trial.args, **trial.kwargs)
    how = _how(probe, picked, device)
    named = (probe.family, probe.label, trial.operation.name, picked, how)
    finding = Finding(*named, dict(_reasons(picked, answers)))
    if picked is None:
        return dataclasses.replace(finding, problem="no backend can run this call")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # observed errors, which tests show
            result = trial.run()
            synchronize(device)
            error = trial.verify(result)
    except Exception as failure:  # whatever goes wrong is what the user wants to know
        problem = " ".join(f"{type(failure).__name__}: {failure}".split())
        return dataclasses.replace(finding, right=False, problem=problem)
    return dataclasses.replace(finding, right=True, error=error)


def _timed(trial: Trial, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    seconds = seconds_of(trial.run, device)
    share, bound = ceilings.share(trial.bytes_moved, trial.flops, seconds)
    return {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(trial.bytes_moved / seconds / 1e9, 2),
        "tflop_per_s": round(trial.flops / seconds / 1e12, 3) if trial.flops else None,
        "share": round(share, 4),
        "bound": bound,
    }


def _how(probe: Probe, picked: str | None, device: torch.device) -> str:
    if picked is None:
        return CANNOT
    if device.type == "cpu":
        return SOFTWARE if probe.fp8 else NATIVE
    if picked in _GENERAL:
        return FALLBACK
    return SOFTWARE if probe.fp8 and not target_of(device).native_e4m3 else NATIVE


def _reasons(picked: str | None, answers: dict[str, Support]) -> Iterator[tuple[str, str]]:
    """Backends before the chosen one with their reasons; all of them if none was chosen."""
    for name, answer in answers.items():
        if name == picked:
            return
        yield name, answer.reason or "runs only when it is named"
