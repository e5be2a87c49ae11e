"""What a row of results says: whose times, of which operation, over what."""

from __future__ import annotations

import re

from lab.page.rows import Row, case_of, name_of, number_before

# Times of other programs in a row, by key.
PEERS = {
    "peer_us": "FlashMLA",
    "flash_mla_us": "FlashMLA",
    "flash_mla_microseconds": "FlashMLA",
    "deep_gemm_us": "DeepGEMM, scores only",
    "topk_us": "DeepGEMM + torch.topk",
    "vllm_us": "DeepGEMM + vLLM top-k",
    "xpu_us": "vLLM XPU path",
    "marlin_us": "Marlin",
    "triton_kernels_us": "triton_kernels",
    "humming_us": "Humming",
    "humming_token_us": "Humming, scale a token",
}
_OURS = ("us", "microseconds", "gluon_sm90_us", "gluon_sm90_w4a8_us", "triton_us")
_INDEX_CASE = re.compile(r"(decode|prefill) (\d+) x (?:(\d+) x )?(\d+)$")


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
        return f"{part}, {_queries(row['rows'])} a request"
    if part == "indexer" and (found := _INDEX_CASE.search(case_of(row))):
        return (
            f"{part}, prefill"
            if found[1] == "prefill"
            else f"{part}, {_queries(found[3])} a request"
        )
    return part


def _queries(count: object) -> str:
    number = int(str(count))
    return {1: "one query", 2: "two queries"}.get(number, f"{number} queries")


def group_of(row: Row) -> str:
    """Operations that are alike, for a plot of all of them; few enough to be told apart."""
    if "extra" in row or "sparse_attention" in case_of(row):
        return "decode attention"
    if "teraflops" in row:
        return "prefill attention"
    name = operation_of(row)
    known = {
        "mqa_logits": "indexer",
        "topk_per_row": "indexer",
        "experts": "experts",
        " linear": "linear layers",
        "projection": "linear layers",
    }
    found = next((group for part, group in known.items() if part in name), None)
    if found is None and (row.get("part") in ("layer", "product") and "others_us" in row):
        return "linear layers"
    return found or "other operations"


def index_place(row: Row) -> tuple[str, float] | None:
    """Series and number of entries of a row of index selection, one query a request."""
    found = _INDEX_CASE.search(case_of(row))
    if found is None:
        return None
    kind, first, queries, keys = found.groups()
    if kind == "decode" and int(queries or 1) != 1:
        return None
    unit = "queries" if kind == "prefill" else "request" if first == "1" else "requests"
    return f"{kind}, {int(first):,} {unit}", float(keys)


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
    return re.split(r",? \d", name_of(row), maxsplit=1)[0].strip().rstrip(",")


def series_of(row: Row) -> str:
    """A case without what it is drawn over."""
    text = name_of(row)
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
