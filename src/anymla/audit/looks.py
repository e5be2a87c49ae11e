"""Descriptions of wrong values: where they are, and what they look like.

A description is for a person who has a minute: zeros, NaN, another token's values, one factor, one
head, one block of a row. It is a hint and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Values whose quotients with the right ones differ by less are called multiples of them.
_SAME_FACTOR = 0.02
# Quotients of values this much smaller than the largest say nothing.
_SMALL = 1e-3
_NAMED = 4  # indices that are listed one by one


def looks_of(
    got: Tensor,
    want: Tensor,
    allowed: Tensor,
    token: int,
    names: Sequence[str],
    rows: str = "row",
) -> str:
    """Describe the wrong values of a token.

    Args:
        got: values of all tokens, float64 [T, ..].
        want: right values in the same shape.
        allowed: largest error of each value in the same shape.
        token: index of the token.
        names: names of the tokens, [T].
        rows: name of an index of the second dimension of three.
    """
    error = (got - want).abs()
    right = (got == want) | (error <= allowed)
    wrong = ~right[token]
    if not bool(wrong.any()):
        return ""
    where = places(wrong, rows)
    kind = kind_of(got, want, allowed, token, wrong, names)
    return f"{where}: {kind}" if kind else where


def places(wrong: Tensor, rows: str = "row") -> str:
    """Describe which values of a token are wrong, bool [C] or [N, C]."""
    count, total = int(wrong.sum()), wrong.numel()
    if total == 1:
        return "the only value"
    flat = wrong.reshape(-1, wrong.shape[-1])
    by_row = flat.any(1).nonzero().flatten().tolist()
    columns = flat.any(0).nonzero().flatten().tolist()
    said = f"{count} of {total} values"
    if len(flat) > 1:
        said += f", {_listed(rows, by_row, len(flat))}"
    if len(columns) < flat.shape[1]:
        said += f", {_listed('channel', columns, flat.shape[1])}"
    return said


def _listed(name: str, indices: list[int], total: int) -> str:
    """List indices: all, a run, or the first few of them."""
    first, last, count = indices[0], indices[-1], len(indices)
    if count == total:
        return f"all {total} {name}s"
    if count == 1:
        return f"{name} {first} of {total}"
    if last - first + 1 == count:
        return f"{name}s {first} to {last} of {total}"
    more = ", .." if count > _NAMED else ""
    shown = ", ".join(map(str, indices[:_NAMED]))
    return f"{count} of {total} {name}s ({shown}{more})"


def kind_of(
    got: Tensor, want: Tensor, allowed: Tensor, token: int, wrong: Tensor, names: Sequence[str]
) -> str:
    """Describe what the ``wrong`` values of a token look like; "" for nothing in particular."""
    values, right = got[token][wrong], want[token][wrong]
    if bool(values.isnan().any()):
        return "NaN" if bool(values.isnan().all()) else f"{int(values.isnan().sum())} are NaN"
    if bool(values.isinf().any()):
        return "infinite" if bool(values.isinf().all()) else f"{int(values.isinf().sum())} infinite"
    if not bool(values.any()):
        return "zeros"
    for other in range(len(got)):
        close = (got[token] - want[other]).abs() <= allowed[other]
        if other != token and values.numel() > 1 and bool(close.all()):
            return f"the values of {names[other]}"
    if values.numel() > 1 and bool((values == values[0]).all()):
        return f"all the same, {float(values[0]):.4g}"
    factor = _factor(values, right)
    if factor is not None:
        return f"{factor:.4g} times what they should be"
    ordered, should = got[token].flatten().sort().values, want[token].flatten().sort().values
    if ordered.numel() > 2 and bool(((ordered - should).abs() <= allowed[token].max()).all()):
        return "the right values in another order"
    return ""


def _factor(values: Tensor, right: Tensor) -> float | None:
    """Return the factor common to some values, if there is one."""
    large = right.abs() > _SMALL * right.abs().max()
    if int(large.sum()) < 2:
        return None
    quotients = values[large] / right[large]
    mean = float(quotients.mean())
    spread = float(quotients.max() - quotients.min())
    return mean if math.isfinite(mean) and spread < _SAME_FACTOR * abs(mean) else None


def same_bytes(rows: Tensor, token: int, names: Sequence[str]) -> str:
    """Describe a stored row by its bytes, uint8 [T, n]: zeros, one value, or another token's."""
    row = rows[token]
    if not bool(row.any()):
        return "zeros"
    if bool((row == row[0]).all()):
        return f"all bytes {int(row[0])}"
    for other in range(len(rows)):
        if other != token and torch.equal(row, rows[other]):
            return f"the bytes of {names[other]}"
    return ""
