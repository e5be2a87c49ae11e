"""What a row of results says: whose times, of which operation, over what."""

from __future__ import annotations

from lab.page.rows import Row

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


def is_number(value: object) -> bool:
    """Whether a value of a row is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
