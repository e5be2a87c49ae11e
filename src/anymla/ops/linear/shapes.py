"""Shapes of DeepSeek-V4's linear layers, which builds and tests share."""

from __future__ import annotations

# Rows, and channels over 128, of Flash's and Pro's weights, as far as configs differ.
GEMMS = (
    (1536, 32), (4096, 32), (8192, 32), (32768, 8), (4096, 64), (6144, 56), (7168, 128), (65536, 12)
)  # fmt: skip
