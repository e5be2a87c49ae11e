"""Calls of every family of operations whose launches are built, and what their code must fulfil."""
