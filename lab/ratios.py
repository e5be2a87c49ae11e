"""Sum up rows that were timed beside peers: ``python -m lab.ratios ROWS.jsonl ...``.

Decode attention on random shapes by groups of heads and with the slowest shapes, prefill attention
and experts row by row. A ratio is the time of the fastest peer of a row over this package's.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

Row = dict[str, Any]
_RANDOM = "decode attention of random shapes beside FlashMLA"
# Prefixes of fields of times, by the names of peers in tables.
_DECODE = {"FlashMLA": "flash_mla", "sgl": "sgl_flash_mla"}
_PREFILL = {"FlashMLA": "peer", "sgl": "sgl_flash_mla"}
_EXPERTS = {"Humming": "humming", "a scale a token": "humming_token"}
# Groups of heads: whole tiles of 64, less than one, and a whole tile and a part of one.
_WHOLE, _FEW, _BETWEEN = "64 and 128 heads", "up to 40 heads", "other heads"
_SLOWEST = 10


def group(heads: int) -> str:
    """Return the name of the group of shapes with so many heads."""
    if heads in (64, 128):
        return _WHOLE
    return _FEW if heads <= 40 else _BETWEEN


def decode_lines(rows: Sequence[Row], slowest: int = _SLOWEST) -> Iterator[str]:
    """Yield lines of decode attention on random shapes: groups, then the slowest shapes."""
    by_group = collections.defaultdict(list)
    for row in rows:
        by_group[group(row["heads"])].append(row)
    for name in (_WHOLE, _BETWEEN, _FEW):
        some = by_group[name]
        if not some:
            continue
        ratios = [row["ratio"] for row in some]
        draws = collections.defaultdict(list)
        for row in some:
            draws[row["draw"]].append(row["ratio"])
        means = ", ".join(f"{_mean(draws[draw]):.3f}" for draw in sorted(draws))
        beside = ", ".join(
            f"{peer} {_mean([row[field] / row['microseconds'] for row in has]):.3f}"
            for peer, prefix in _DECODE.items()
            if (has := [row for row in some if (field := f"{prefix}_microseconds") in row])
        )
        worst = max(row["error"] for row in some)
        yield (
            f"{name}: {len(some)} shapes, {_mean(ratios):.3f} (by draw {means}; {beside}), least "
            f"{min(ratios):.3f}, {sum(ratio < 1 for ratio in ratios)} below 1, error {worst:.2e}"
        )
    for row in sorted(rows, key=lambda row: float(row["ratio"]))[:slowest]:
        times = ", ".join(_times(row, _DECODE, "_microseconds"))
        lengths = "" if row["lengths"] else ", no lengths"
        yield (
            f"  {row['ratio']:.3f}  {row['case']}{lengths} (seed {row['draw']}, {row['number']}): "
            f"{row['microseconds']:.1f} us, {times}"
        )


def prefill_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each row of prefill attention, with rates of all."""
    for row in rows:
        work = row["teraflops"] * row["us"]
        rates = [f"{row['us']:.0f} us ({row['teraflops']:.0f} TFLOP/s)"]
        for peer, prefix in _PREFILL.items():
            if (us := row.get(f"{prefix}_us")) is not None:
                rates.append(f"{peer} {us:.0f} ({work / us:.0f})")
        yield f"  {row['ratio']:.3f}  {row['case']}: {', '.join(rates)}"


def expert_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each row of experts, with each peer's time over ours or why it has none."""
    for row in rows:
        said = [f"{row['us']:.0f} us"]
        for peer, prefix in _EXPERTS.items():
            if (us := row.get(f"{prefix}_us")) is not None:
                said.append(f"{peer} {us:.0f} ({us / row['us']:.3f})")
            elif reason := row.get(f"{prefix}_absent"):
                said.append(f"{peer}: {reason}")
        yield f"  {row['case']}: {', '.join(said)}"


def _times(row: Row, peers: dict[str, str], end: str) -> Iterator[str]:
    for peer, prefix in peers.items():
        if (us := row.get(prefix + end)) is not None:
            yield f"{peer} {us:.1f}"


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of all rows that were timed beside a peer."""
    decode = [row for row in rows if row["part"] == _RANDOM and "ratio" in row]
    if decode:
        yield "decode attention on random shapes"
        yield from decode_lines(decode)
    prefill = [row for row in rows if "teraflops" in row and "ratio" in row and "us" in row]
    if prefill:
        yield "prefill attention"
        yield from prefill_lines(prefill)
    experts = [row for row in rows if row["part"] == "experts"]
    if experts:
        yield "experts"
        yield from expert_lines(experts)


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(files: tuple[Path, ...]) -> None:
    """Sum up rows of FILES that were timed beside peers."""
    texts = (file.read_text(encoding="utf-8") for file in files)
    for line in lines([json.loads(line) for text in texts for line in text.splitlines()]):
        click.echo(line)


if __name__ == "__main__":
    main()
