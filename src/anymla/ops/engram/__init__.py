"""Engram, V4.1's n-gram memory: table rows by n-gram hashes, added to the streams by gates."""

from anymla.ops.engram.interface import engram_gate, engram_rows

__all__ = ["engram_gate", "engram_rows"]
