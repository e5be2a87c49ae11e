"""DeepSeek-V4's hybrid sparse attention for every accelerator, and for a plain CPU."""

__version__ = "0.1.0"
