"""Audit of vLLM's DeepSeek-V4: takes cases from the layers of a live model, vLLM's own or ours.

Nothing is replaced. Hooks around a method record what goes in and what comes out, for the sampled
tokens of audited steps; captured graphs record it again in each replay (``anymla.audit.rows``).
What lies in the engine's caches is gathered on the device when the method, or the graph, has run.
All of a step's bytes leave the device together, and a process of its own judges them: the engine
neither waits nor looks at a value. ``table`` lists the methods.
"""

from anymla.engines.vllm.audit.hooks import Hooks
from anymla.engines.vllm.audit.runners import start

__all__ = ["Hooks", "start"]
