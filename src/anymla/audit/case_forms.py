"""Checks that the tensors and numbers of a dumped case fit each other, before they are used.

A dump is an untrusted file. Its tensors and numbers are compared with each other here, so that no
check or kernel sees shapes that do not fit, and no product of them exceeds the size of a real
model's dump.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from anymla.audit.case import Case
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8
from anymla.testing.oracle.row_formats import ROW_FORMATS

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_E4M3 = (torch.float8_e4m3fn,)
_EITHER_E4M3 = (*_E4M3, torch.float8_e4m3fnuz)
_BYTES = (torch.uint8, torch.int8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, *_BYTES)
_SCALES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)
_FLAGS = (torch.bool,)
# Limits of a computed tensor's elements and of a product's multiplications. A selection among the
# 262,144 entries of a million tokens has 2^25 and 2^31.
_MOST_ELEMENTS, _MOST_PRODUCTS = 1 << 27, 1 << 35
_MOST_TIMES = 1000  # limit of iterations
_MOST_RATIO = 1 << 16


def check_form(case: Case) -> None:
    """Raise ValueError, in one line, unless a case's tensors and numbers fit each other.

    Args:
        case: case of any method as dumped; ``checks.judge`` refuses unknown methods.
    """
    if len(case.requests) != len(case.positions):
        raise ValueError(
            f"a case of {case.method} names {len(case.requests)} requests and "
            f"{len(case.positions)} positions"
        )
    if case.method in _FORMS:
        _FORMS[case.method](_Form(case))


class _Form:
    """Checks one case; sizes that have been read are compared with later ones."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def has(self, name: str) -> bool:
        return name in self._case.tensors

    def tensor(
        self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int | None
    ) -> tuple[int, ...]:
        """Check a tensor and return its shape; None in ``shape`` allows any size."""
        tensor = self._tensor(name, dtypes)
        found = tuple(tensor.shape)
        if len(found) != len(shape) or any(
            want is not None and size != want for size, want in zip(found, shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self._wrong(name, f"[{wanted}]", list(found))
        self.elements(*found)
        return found

    def count(self, name: str, dtypes: tuple[torch.dtype, ...], count: int) -> None:
        """Check the number of elements of a tensor of any shape."""
        tensor = self._tensor(name, dtypes)
        if tensor.numel() != count:
            raise self._wrong(name, f"of {count} elements", list(tensor.shape))

    def elements(self, *sizes: int) -> None:
        """Check the number of elements of a tensor that will be computed."""
        if math.prod(sizes) > _MOST_ELEMENTS:
            raise self._large(sizes, _MOST_ELEMENTS)

    def products(self, *sizes: int) -> None:
        """Check the number of multiplications of a product."""
        if math.prod(sizes) > _MOST_PRODUCTS:
            raise self._large(sizes, _MOST_PRODUCTS)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        value = self._case.numbers.get(name, default)
        if value is None:
            raise ValueError(f"a case of {self._case.method} lacks {name!r}")
        if not isinstance(value, int | float) or not least <= value <= most:
            raise self._wrong(name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self.number(name, least, most, default)
        if value != int(value):
            raise self._wrong(name, "an integer", value)
        return int(value)

    def eps(self, *names: str) -> None:
        for name in names:
            self.number(name, 0.0, 1.0)

    def text(self, name: str) -> None:
        if not isinstance(self._case.numbers.get(name), str):
            raise self._wrong(name, "a text", self._case.numbers.get(name))

    def layout(self, *allowed: str) -> str:
        value = self._case.numbers.get("layout", allowed[0])
        if value not in allowed:
            raise self._wrong("layout", " or ".join(allowed), value)
        return str(value)

    def rows(self, prefix: str, layout: str, count: int | None) -> int:
        """Check a cache's rows, values and scales, and return their number."""
        held = ROW_FORMATS[layout]
        found, _ = self.tensor(f"{prefix}data", _BYTES, count, held.data_bytes)
        self.tensor(f"{prefix}scales", _BYTES, found, held.scale_bytes)
        self.elements(found, held.channels)
        return found

    def table(self, tokens: int, width: int) -> None:
        """Check that the rotary table has a row for each token and suits rows of that width."""
        _, channels = self.tensor("cos_sin", _FLOATS, tokens, None)
        if channels % 2 or not 0 < channels <= width:
            raise self._wrong("cos_sin", f"[{tokens}, an even number up to {width}]", channels)

    def even(self, name: str, size: int) -> int:
        """Return half of an even size."""
        if size % 2:
            raise self._wrong(name, "of an even width", size)
        return size // 2

    def positions(self, count: int) -> None:
        if len(self._case.positions) != count:
            raise self._wrong("positions", f"{count} numbers", len(self._case.positions))

    def _tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        if name not in self._case.tensors:
            raise ValueError(f"a case of {self._case.method} lacks {name!r}")
        tensor = self._case.tensors[name]
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self._wrong(name, allowed, str(tensor.dtype).removeprefix("torch."))
        return tensor

    def _wrong(self, name: str, wanted: str, got: object) -> ValueError:
        shown = repr(got)[:100]
        return ValueError(f"a case of {self._case.method}: {name} must be {wanted}, got {shown}")

    def _large(self, sizes: tuple[int, ...], most: int) -> ValueError:
        shown = " x ".join(map(str, sizes))
        return ValueError(f"a case of {self._case.method} is too large: {shown}, at most {most}")


def _qkv_norm(form: _Form) -> None:
    tokens, _ = form.tensor("qr", _FLOATS, None, None)
    for name in ("qr", "kv"):
        _, width = form.tensor(name, _FLOATS, tokens, None)
        form.tensor(f"{name}_weight", _FLOATS, width)
        form.tensor(f"{name}_out", _FLOATS, tokens, width)
    form.eps("eps")


def _query(form: _Form) -> None:
    tokens, heads, width = form.tensor("q", _FLOATS, None, None, None)
    form.tensor("out", _FLOATS, tokens, heads, width)
    form.table(tokens, width)
    form.eps("eps")


def _window_row(form: _Form) -> None:
    layout = form.layout(MAIN_FP8)
    tokens, width = form.tensor("kv", _FLOATS, None, ROW_FORMATS[layout].channels)
    form.table(tokens, width)
    form.rows("", layout, tokens)


def _compressor_state(form: _Form) -> None:
    tokens, width = form.tensor("kv_score", _FLOATS, None, None)
    ratio = form.integer("ratio", 1, _MOST_RATIO)
    form.tensor("ape", _FLOATS, ratio, form.even("kv_score", width))
    form.tensor("state", _FLOATS, tokens, width)
    form.positions(tokens)


def _compressed_row(form: _Form) -> None:
    layout = form.layout(MAIN_FP8, INDEX_FP8)
    ratio, overlap = form.integer("ratio", 1, _MOST_RATIO), form.integer("overlap", 0, 1)
    channels = ROW_FORMATS[layout].channels
    shape = ratio * (1 + overlap), 2 * channels * (1 + overlap)
    tokens, *_ = form.tensor("state", _FLOATS, None, *shape)
    form.tensor("present", _FLAGS, tokens, shape[0])
    form.tensor("norm_weight", _FLOATS, channels)
    form.table(tokens, channels)
    form.rows("", layout, tokens)
    form.eps("eps")


def _index_query(form: _Form) -> None:
    width = ROW_FORMATS[INDEX_FP8].channels
    tokens, heads, _ = form.tensor("q", _FLOATS, None, None, width)
    form.tensor("weights", _FLOATS, tokens, heads)
    form.tensor("weights_out", _FLOATS, tokens, heads)
    form.tensor("codes", _BYTES + _EITHER_E4M3, tokens, heads, width)
    form.integer("fnuz", 0, 1, 0)
    form.table(tokens, width)
    form.number("softmax_scale", 0.0, 1e6)
    form.number("head_scale", 0.0, 1e6)


def _selection(form: _Form) -> None:
    layout = form.layout(INDEX_FP8)
    width = ROW_FORMATS[layout].channels
    heads, _ = form.tensor("q", (*_FLOATS, *_EITHER_E4M3), None, width)
    form.tensor("weights", _FLOATS, heads)
    form.tensor("chosen", _INTEGERS, None)
    entries = form.rows("", layout, None)
    form.integer("k", 1, _MOST_ELEMENTS)
    form.elements(heads, entries)
    form.products(heads, entries, width)


def _slots(form: _Form) -> None:
    (pages,) = form.tensor("table", _INTEGERS, None)
    form.tensor("listed", _INTEGERS, None)
    if form.has("length"):
        form.count("length", _INTEGERS, 1)
    size = form.integer("page_size", 1, _MOST_ELEMENTS)
    last = form.integer("last", 0, pages * size)
    form.integer("first", 0, last)
    form.elements(last)
    form.text("what")


def _attention(form: _Form) -> None:
    width = ROW_FORMATS[MAIN_FP8].channels
    heads, _ = form.tensor("q", _FLOATS, None, width)
    form.tensor("out", _FLOATS, heads, width)
    form.tensor("sink", _FLOATS, heads)
    if form.has("cos_sin"):
        form.table(1, width)
    rows = form.rows("window_", MAIN_FP8, None)
    if form.has("entries_scales") or form.has("entries_data"):
        entries = form.rows("entries_", MAIN_FP8, None)
        if form.has("chosen"):
            form.tensor("chosen", _INTEGERS, entries)
        rows += entries
    form.number("scale", 0.0, 1e6)
    form.elements(rows, width)
    form.elements(heads, rows)
    form.products(heads, rows, width)


def _projection(form: _Form) -> None:
    tokens, heads, width = form.tensor("o", _FLOATS, None, None, None)
    form.table(tokens, width)
    coded = form.has("wo_a_scale")
    dtypes = _BYTES + _E4M3 if coded else _FLOATS
    groups, rank, inputs = form.tensor("wo_a", dtypes, None, None, None)
    if groups * inputs != heads * width:
        form.tensor("wo_a", dtypes, groups, rank, heads * width // max(1, groups))
    if coded:
        blocks = -(-groups * rank // 128), -(-inputs // 128)
        form.count("wo_a_scale", _SCALES, math.prod(blocks))
    form.tensor("out", _FLOATS, tokens, groups * rank)
    form.products(tokens, groups, rank, inputs)


def _linear(form: _Form) -> None:
    tokens, inputs = form.tensor("x", _FLOATS, None, None)
    coded = form.has("weight_scale")
    outputs, _ = form.tensor("weight", _BYTES + _E4M3 if coded else _FLOATS, None, inputs)
    form.tensor("y", _FLOATS, tokens, outputs)
    form.number("unit", 0.0, 1.0, 0.0)
    form.products(tokens, outputs, inputs)
    if coded:
        if inputs % 128:
            form.tensor("x", _FLOATS, tokens, -(-inputs // 128) * 128)
        form.tensor("weight_scale", _SCALES, -(-outputs // 128), inputs // 128)
        # The check compares the errors of its outputs with each other.
        form.elements(tokens, outputs, inputs)
        form.elements(tokens, outputs, outputs)
        form.products(tokens, outputs, outputs, inputs)


def _experts(form: _Form) -> None:
    _, inputs = form.tensor("x", _FLOATS, 1, None)
    coded = form.has("w13_scale") or form.has("w2_scale")
    part, dtypes = (2, _BYTES) if coded else (1, _FLOATS)
    experts, both, width = form.tensor("w13", dtypes, None, None, None)
    inner = form.even("w13", both)
    if width * part != inputs:
        form.tensor("w13", dtypes, experts, both, inputs // part)
    _, outputs, _ = form.tensor("w2", dtypes, experts, None, inner // part)
    if coded:
        if inputs % 128 or inner % 128:
            form.tensor("w13", dtypes, experts, -(-both // 256) * 256, -(-width // 64) * 64)
        form.tensor("w13_scale", _SCALES, experts, both, inputs // 32)
        form.tensor("w2_scale", _SCALES, experts, outputs, inner // 32)
    if outputs > inputs:
        form.tensor("w2", dtypes, experts, inputs, None)
    form.count("weights", _FLOATS, experts)
    form.count("out", _FLOATS, outputs)
    if form.has("shared"):
        form.tensor("shared", _FLOATS, 1, outputs)
    form.number("limit", 0.0, math.inf)
    form.elements(experts, inputs, inner)
    form.elements(both, inputs)
    form.elements(outputs, inputs)
    form.products(experts, outputs, inner, inputs)


def _router(form: _Form) -> None:
    if form.has("logits"):
        tokens, experts = form.tensor("logits", _FLOATS, None, None)
        form.elements(experts, experts)
    else:
        tokens, width = form.tensor("x", _FLOATS, None, None)
        experts, _ = form.tensor("weight", _FLOATS, None, width)
        form.elements(tokens, experts)
        form.products(tokens, experts, width)
    k = form.integer("k", 1, experts)
    form.tensor("ids", _INTEGERS, tokens, k)
    form.tensor("weights", _FLOATS, tokens, k)
    if form.has("known"):
        form.tensor("known", _INTEGERS, tokens, k)
    else:
        form.tensor("bias", _FLOATS, experts)
    form.number("scale", 0.0, 1e6)


def _streams(form: _Form, mixes: Callable[[int], int], scales: int) -> tuple[int, int, int]:
    tokens, count, width = form.tensor("h", _FLOATS, None, None, None)
    form.tensor("fn", _FLOATS, mixes(count), count * width)
    form.tensor("base", _FLOATS, mixes(count))
    form.tensor("scale", _FLOATS, scales)
    form.eps("norm_eps", "hc_eps")
    form.products(tokens, mixes(count), count * width)
    return tokens, count, width


def _hc_pre(form: _Form) -> None:
    tokens, count, width = _streams(form, lambda n: n * (n + 2), 3)
    form.tensor("y", _FLOATS, tokens, width)
    form.count("post", _FLOATS, tokens * count)
    form.count("comb", _FLOATS, tokens * count * count)
    if form.has("norm_weight"):
        form.tensor("norm_weight", _FLOATS, width)
    form.products(form.integer("iters", 1, _MOST_TIMES), tokens, count, count)
    form.integer("fused", 0, 1, 0)


def _hc_post(form: _Form) -> None:
    tokens, count, width = form.tensor("h", _FLOATS, None, None, None)
    form.tensor("u", _FLOATS, tokens, width)
    form.count("post", _FLOATS, tokens * count)
    form.count("comb", _FLOATS, tokens * count * count)
    form.tensor("streams", _FLOATS, tokens, count, width)
    form.products(tokens, count, count, width)


def _hc_head(form: _Form) -> None:
    tokens, _, width = _streams(form, lambda n: n, 1)
    form.tensor("y", _FLOATS, tokens, width)


def _at_rest(form: _Form) -> None:
    rows, width = form.tensor("before", _BYTES, None, None)
    form.tensor("after", _BYTES, rows, width)
    for name in ("slots", "slots_before", "entries", "since"):
        form.tensor(name, _INTEGERS, rows)
    form.integer("codes", 0, width)
    form.text("what")


_FORMS: dict[str, Callable[[_Form], None]] = {
    "at_rest": _at_rest,
    "attention": _attention,
    "compressed_row": _compressed_row,
    "compressor_state": _compressor_state,
    "experts": _experts,
    "hc_head": _hc_head,
    "hc_post": _hc_post,
    "hc_pre": _hc_pre,
    "index_query": _index_query,
    "linear": _linear,
    "projection": _projection,
    "qkv_norm": _qkv_norm,
    "query": _query,
    "router": _router,
    "selection": _selection,
    "slots": _slots,
    "window_row": _window_row,
}
