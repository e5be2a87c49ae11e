"""Decode attention of random shapes on Hopper, by every schedule that may be chosen for them.

What ``config.TIMES`` of sparse attention is fitted to, and what shows whether the choice is right.
Timed as ``cases.sparse_attention`` does; plans are made before.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from anymla.bench.runner import Case, Clock, Subject, Values
from anymla.ops.attention.decode_config import (
    Schedule,
    blocks_of,
    choose_schedule,
    predicted_us,
    schedules,
)
from lab.cases.sparse_attention import DecodeInputs, Drawn

PART = "decode attention by every schedule"
_FIELDS = (
    "tile_heads", "head_tiles", "cut", "splits", "longest_first", "planned", "by_width",
    "one_block", "chosen",
)  # fmt: skip
# Fields that the label already shows or that need not be printed.
IN_LABEL = (
    "batch", "rows", "heads", "extra", "page", "ragged", "lengths", "width", "draw", "number",
    *_FIELDS,
)  # fmt: skip


def schedule_cases(chosen: Iterable[Drawn], sm_count: int) -> Iterator[Case]:
    """Yield a case for each schedule of each shape.

    Args:
        chosen: random shapes to measure.
        sm_count: number of SMs on the device.
    """
    for shape in chosen:
        tokens, widths = shape.batch * shape.rows, shape.widths
        given = {"lengths": shape.lengths, "planned": shape.lengths}
        best = choose_schedule(tokens, shape.heads, widths, sm_count, **given)
        some = schedules(tokens, shape.heads, blocks_of(widths), sm_count, **given)
        for schedule in some:
            fields = dataclasses.asdict(schedule) | {
                "tile_heads": schedule.heads,
                "cut": schedule.cut.name,
                "chosen": schedule == best,
            }
            yield Case(
                PART,
                f"{shape.label}, {_words(schedule)}",
                functools.partial(_scheduled, shape, schedule),
                shape.fields | {name: fields[name] for name in _FIELDS},
                seed=shape.input_seed,
            )


def _words(schedule: Schedule) -> str:
    names = {
        "longest first": schedule.longest_first,
        "one block": schedule.one_block,
        "by width": schedule.by_width and not schedule.one_block,
    }
    count = f" {schedule.splits}" if schedule.splits > 1 else ""
    words = [f"{schedule.head_tiles} x {schedule.heads} {schedule.cut.name}{count}"]
    return ", ".join([*words, *(name for name, is_so in names.items() if is_so)])


def _scheduled(shape: Drawn, schedule: Schedule, clock: Clock) -> Iterator[Subject]:
    inputs = DecodeInputs.draw(shape, clock.device)

    def after(_: float) -> Values:
        if shape.ragged:
            return {}
        blocks, tokens = blocks_of(shape.widths), shape.batch * shape.rows
        predicted = predicted_us(schedule, tokens, shape.heads, blocks, (blocks,))
        return {"predicted_microseconds": predicted}

    yield inputs.checked(_calls(inputs, schedule), "microseconds", "error", after=after)


def _calls(inputs: DecodeInputs, schedule: Schedule) -> list[Callable[[], Tensor]]:
    """Make calls by a schedule, one for each set of lists."""
    launch = importlib.import_module("anymla.ops.attention.gluon_sm90_decode_launch")
    results = importlib.import_module("anymla.ops.attention.triton_decode_combine")
    shape, q = inputs.shape, inputs.q.flatten(0, 1)
    lengths, extra_lengths = (
        None if each is None else each.repeat_interleave(shape.rows)
        for each in (inputs.lengths, inputs.extra_lengths)
    )
    plan = None
    if schedule.planned:
        plan = launch.make_plan(schedule, len(q), lengths, extra_lengths, shape.widths)
    to = results.AttentionOut(q.new_empty(q.shape), q.new_empty(q.shape[:2]).float())

    def attend(window: Tensor, extra: Tensor | None) -> Tensor:
        rows = inputs.cache_rows(window, extra)
        call = launch.Call.of(q, rows, inputs.sink, None, False, None)
        launch.attend(dataclasses.replace(call, schedule=schedule, plan=plan), to)
        out: Tensor = to.out
        return out

    return [functools.partial(attend, *each) for each in inputs.lists]
