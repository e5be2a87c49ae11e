"""DeepSeek-V4's own configurations, in DeepSeek's spelling."""

from anymla.testing.published import FLASH, FLASH_0731, FLASH_VISION, PRO, PRO_0813

__all__ = ["FLASH", "FLASH_0731", "FLASH_VISION", "PRO", "PRO_0813"]
