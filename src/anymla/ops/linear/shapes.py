"""Shapes of DeepSeek-V4's linear layers, which builds and tests share."""

from __future__ import annotations

# Rows and channels of Flash's and Pro's weights, as far as configs differ.
GEMMS = (
    (1536, 4096), (4096, 4096), (8192, 4096), (32768, 1024), (4096, 8192), (6144, 7168),
    (7168, 16384), (65536, 1536),
)  # fmt: skip
