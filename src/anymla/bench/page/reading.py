"""What a row of results says: whose times, of which operation, over what."""

from __future__ import annotations

import re
from collections.abc import Iterable

from anymla.bench.page.rows import Row, case_of, device_of, number_before

# Times of other programs in a row, by key.
PEERS = {
    "peer_us": "FlashMLA",
    "flash_mla_us": "FlashMLA",
    "flash_mla_microseconds": "FlashMLA",
    "deep_gemm_us": "DeepGEMM, scores only",
    "topk_us": "DeepGEMM + torch.topk",
    "vllm_us": "DeepGEMM + vLLM top-k",
    "xpu_us": "vLLM XPU path",
}
_OURS = ("us", "microseconds", "gluon_sm90_us", "triton_us")
_INDEX_CASE = re.compile(r"(decode|prefill) (\d+) x (?:(\d+) x )?(\d+)$")


def latest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each measurement."""
    newest: dict[tuple[str, ...], Row] = {}
    for row in rows:
        how = str(row.get("backend")), str(bool(row.get("side_stream")))
        key = (device_of(row), str(row.get("part")), case_of(row), *how)
        known = newest.get(key)
        if known is None or str(row.get("date", "")) >= str(known.get("date", "")):
            newest[key] = row
    return list(newest.values())


def own_us(row: Row) -> float | None:
    """Microseconds of this package in a row, the best of its backends."""
    times = [float(row[key]) for key in _OURS if isinstance(row.get(key), int | float)]
    return min(times) if times else None


def peer_us(row: Row) -> dict[str, float]:
    """Microseconds of other programs in a row, by name."""
    return {name: float(row[key]) for key, name in PEERS.items() if is_number(row.get(key))}


def microseconds(us: float) -> str:
    """A time with the digits that a measurement has."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"


def part_of(row: Row) -> str:
    """The part of a suite that a row belongs to; its file's name where it does not say."""
    part = str(row.get("part") or str(row.get("file", "")).removesuffix(".jsonl"))
    if is_number(row.get("extra")) and is_number(row.get("rows")):
        return f"{part}, {'one query' if row['rows'] == 1 else 'two queries'} a request"
    return f"{part}, prefill" if case_of(row).startswith("prefill ") else part


def group_of(row: Row) -> str:
    """Operations that are alike, for a plot of all of them."""
    if "extra" in row:
        return f"decode attention, {row.get('backend')}"
    if "teraflops" in row:
        return f"prefill attention, {row.get('backend')}"
    name = operation_of(row)
    known = {
        "sparse_attention": "decode attention, triton",
        " linear": "linear layers",
        "grouped_output_projection": "output projection",
        "mqa_logits and": "index scores and top-k",
        "mqa_logits": "index scores",
        "experts": "experts",
    }
    return next((group for part, group in known.items() if part in name), name)


def index_place(row: Row) -> tuple[str, float] | None:
    """Series and number of entries of an indexer's row."""
    case = case_of(row)
    found = _INDEX_CASE.search(case)
    if found:
        kind, first, second, keys = found.groups()
        return f"select 512, {kind} {first}{f' x {second}' if second else ''}", float(keys)
    keys, requests = number_before("keys", case), number_before("x", case)
    if keys is None or requests is None:
        return None
    return f"{operation_of(row)}, {requests:g} rows", keys


def batch_of(row: Row) -> float | None:
    """What a row is drawn over: its context if it is of a prefill, else its tokens or requests."""
    case = case_of(row)
    if "kind" in row and is_number(row.get("context")):
        return float(row["context"])
    for key in ("batch", "tokens", "requests"):
        if is_number(row.get(key)):
            return float(row[key])
    after = re.search(r"\bbatch (\d+)", case)
    if after:
        return float(after[1])
    words = ("tokens", "queries", "x")
    return next((n for n in (number_before(word, case) for word in words) if n is not None), None)


def operation_of(row: Row) -> str:
    """A case without its sizes: everything before the first comma that a number follows."""
    return re.split(r",? \d", case_of(row), maxsplit=1)[0].strip().rstrip(",")


def series_of(row: Row) -> str:
    """A case without what it is drawn over."""
    text = case_of(row)
    if "kind" in row:
        text = re.sub(r" (T=\d+ )?of \d+$", "", text)
    for pattern in (
        r",? ?\b\d[\d,]* (tokens|queries)\b",
        r",? ?\bbatch \d+",
        r"\bb\d+ ",
        r"\b\d[\d,]* x ",
    ):
        text = re.sub(pattern, "", text, count=1)
    return text.strip(" ,") or str(row.get("part", "")) or "-"


def in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts "h8" before "h16"."""
    return [(int(word) if word.isdigit() else 0, word) for word in re.split(r"(\d+)", name)]


def is_number(value: object) -> bool:
    """Whether a value of a row is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
