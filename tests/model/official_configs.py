"""DeepSeek-V4's own configurations, in DeepSeek's spelling."""

from anymla.testing.published import FLASH, PRO

__all__ = ["FLASH", "PRO"]
