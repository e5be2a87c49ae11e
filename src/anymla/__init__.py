"""DeepSeek-V4's hybrid sparse attention for every accelerator, and for a plain CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anymla.runtime.llm import LLM, Generation

__version__ = "0.2.0"
__all__ = ["LLM", "Generation"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name in __all__:
        from anymla.runtime import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
