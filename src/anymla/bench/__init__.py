"""Counting of work, timing, and the benchmarks behind the published figures."""
