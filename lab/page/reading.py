"""Read times of a result row: this package's own, and other programs' by name."""

from __future__ import annotations

from lab.page.rows import Row

_SGL = "sgl-flash-mla"
# Names of other programs by the key that holds their time in a row.
PEERS = {
    "peer_us": "FlashMLA",
    "flash_mla_us": "FlashMLA",
    "flash_mla_microseconds": "FlashMLA",
    "sgl_flash_mla_us": _SGL,
    "sgl_flash_mla_microseconds": _SGL,
    "deep_gemm_us": "DeepGEMM, scores only",
    "topk_us": "DeepGEMM + torch.topk",
    "vllm_us": "DeepGEMM + vLLM top-k",
    "xpu_us": "vLLM XPU path",
    "marlin_us": "Marlin",
    "triton_kernels_us": "triton_kernels",
    "humming_us": "Humming",
    "cudnn_frontend_us": "cuDNN frontend",
    "humming_token_us": "Humming, scale a token",
}
# W4A8 was a backend of its own when some rows were recorded.
_OURS = ("us", "microseconds", "gluon_sm90_us", "gluon_sm90_w4a8_us", "triton_us")


def own_us(row: Row) -> float | None:
    """Return this package's microseconds in a row, its fastest backend's; None without any."""
    times = [float(row[key]) for key in _OURS if isinstance(row.get(key), int | float)]
    return min(times) if times else None


def peer_us(row: Row) -> dict[str, float]:
    """Return the microseconds of other programs in a row, by the program's name."""
    return {name: float(row[key]) for key, name in PEERS.items() if is_number(row.get(key))}


def flash_mla_us(row: Row) -> float | None:
    """Return the microseconds of the fastest build of FlashMLA in a row; None without any."""
    times = [us for name, us in peer_us(row).items() if name in ("FlashMLA", _SGL)]
    return min(times, default=None)


def microseconds(us: float) -> str:
    """Write a time in microseconds: four digits, or all digits of the integer from 1,000 on."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"


def is_number(value: object) -> bool:
    """True for an integer or a float; False for a bool and for anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool)
