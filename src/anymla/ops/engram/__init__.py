"""Engram, V4.1's memory: rows that n-grams are hashed to, added to the streams by gates."""

from anymla.ops.engram.interface import engram_gate, engram_rows

__all__ = ["engram_gate", "engram_rows"]
