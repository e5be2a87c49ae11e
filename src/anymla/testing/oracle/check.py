"""Judgement of a recorded run of the engine: its results, its cache rows and its decisions."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import torch

from anymla.testing.oracle.judge import Judge, RowFindings
from anymla.testing.oracle.model import OracleModel
from anymla.testing.oracle.recording import Recording
from anymla.testing.oracle.selection import Selections
from anymla.testing.tolerance import Bound, accumulation, ulps


@dataclasses.dataclass(frozen=True)
class RunReport:
    """Findings of a check.

    Attributes:
        tokens: number of positions that were run.
        compared: number of log-probabilities compared.
        max_difference: |run's - oracle's| log-probability, the largest relative to its bound.
        mean_difference: mean of the absolute differences.
        allowed: bound of ``max_difference``; tokens may have different bounds (``Judge.more``).
        rows: findings by kind of cache row: "window", "compressed", "index".
        selections: findings by kind of selection: "topk", "experts".
    """

    tokens: int
    compared: int
    max_difference: float
    mean_difference: float
    allowed: Bound
    rows: dict[str, RowFindings]
    selections: dict[str, Selections]

    @property
    def ok(self) -> bool:
        """True if every finding is within its bound."""
        return (
            self.max_difference <= self.allowed
            and not any(found.unexplained for found in self.rows.values())
            and not any(found.violations for found in self.selections.values())
        )

    def lines(self) -> list[str]:
        """Return the findings as text, one a line."""
        lines = [
            f"log-probabilities: {self.compared} compared, largest difference "
            f"{self.max_difference:.3g} (mean {self.mean_difference:.3g}, "
            f"allowed {float(self.allowed):.3g})"
        ]
        for kind, found in self.rows.items():
            lines.append(
                f"{kind} rows ({found.layout_id}): {found.rows} rows, "
                f"{found.identical / found.channels:.4%} of channels identical, "
                f"{found.unexplained} unexplained" + (f"; {found.first}" if found.first else "")
            )
        for kind, judged in self.selections.items():
            if judged.checked:
                lines.append(
                    f"{kind} selections: {judged.checked} checked by score, {judged.swapped} "
                    f"near-ties ({judged.worst:.2g} of their bound), "
                    f"{len(judged.violations)} wrong"
                    + (f"; {judged.violations[0]}" if judged.violations else "")
                )
        return lines


def check_run(
    directory: str | pathlib.Path,
    recording: Recording,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    *,
    dtype: torch.dtype = torch.float32,
) -> RunReport:
    """Compare a run with the oracle that reads the same cache bytes.

    The oracle computes every layer in float64 from its own inputs, but attends to the rows that the
    run stored and uses the run's selections. So the only remaining difference is the run's
    arithmetic, and rows, selections and log-probabilities are judged separately.

    Args:
        directory: directory of the checkpoint.
        recording: recording of a ``Recorder``.
        token_ids: prompt and generated tokens; the last may be one that was never run.
        logprobs: log-probability of each token given those before it; None if unknown (as the
            first).
        dtype: dtype of the run's activations; with the checkpoint's activation scheme it determines
            the bounds (``hidden_error``).

    Returns:
        The report; ``ok`` is the verdict.

    Raises:
        ValueError: lengths differ, or the recording belongs to other tokens.
        LookupError: the recording lacks rows or decisions.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(
            f"check_run: {len(token_ids)} tokens but {len(logprobs)} log-probabilities"
        )
    ran = recording.token_ids[: len(token_ids)]
    if ran != list(token_ids[: len(ran)]) or len(token_ids) - len(ran) > 1:
        raise ValueError("check_run: the recording is of other tokens than token_ids")
    model = OracleModel(directory)
    rounds_inputs = dtype != torch.float32 and model.config.dynamic_activations
    width = recording.streams(1).shape[-1]
    errors = [
        hidden_error(dtype, layer, width, quantized_inputs=rounds_inputs)
        for layer in range(model.config.layers + 1)
    ]
    judge = Judge(recording, errors)
    result = model.run(ran, judge=judge)
    want = result.logprobs(token_ids)
    known = [i for i, value in enumerate(logprobs[1:]) if value is not None]
    got = torch.tensor([logprobs[i + 1] for i in known], dtype=torch.float64)
    spread = max(1.0, float(result.logits.std(-1).mean()))
    difference = (got - want[known]).abs()
    more = judge.more[known] if judge.more.ndim else judge.more.expand(len(known))
    at = int((difference / (more + float(errors[-1]))).argmax()) if known else None
    largest = 0.0 if at is None else float(difference[at])
    return RunReport(
        tokens=len(ran),
        compared=len(known),
        max_difference=math.inf if math.isnan(largest) else largest,
        mean_difference=float(difference.mean()) if known else 0.0,
        allowed=(errors[-1] + (0.0 if at is None else float(more[at]))) * spread,
        rows=judge.found,
        selections=judge.selections,
    )


def hidden_error(
    dtype: torch.dtype, layer: int, width: int, *, quantized_inputs: bool = False
) -> Bound:
    """Return the relative error of the results of layer ``layer``.

    Each attention or expert sub-layer rounds eight times to the activations' dtype, half a unit
    each, and accumulates dot products as wide as the model in float32. The residual streams keep
    the errors of the 2 * layer sub-layers before, which at worst add up.

    Linear layers that round their inputs to e4m3 (``quantized_inputs``) err by 2.6 % each: a unit
    is up to 1/8 of a value, and the error is uniform in it. Two in a row give 3.7 %; six standard
    deviations of that are two units. These errors are independent and add as squares.

    Args:
        dtype: dtype of the activations.
        layer: index of the layer; the number of layers gives the error of the head's input.
        width: hidden size of the model.
        quantized_inputs: True if quantised linear layers round their inputs.
    """
    sublayers = 1 + 2 * layer
    error = sublayers * (ulps(dtype, 4) + accumulation(width, torch.float32, c=1.0))
    if quantized_inputs:
        error = error + math.sqrt(sublayers) * ulps(torch.float8_e4m3fn, 2)
    return error
