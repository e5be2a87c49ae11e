"""Errors of the interpreter."""


class UnknownInstruction(NotImplementedError):
    """An instruction, or a form of one, whose meaning the interpreter does not know."""


class Fault(RuntimeError):
    """A compiled program did what no correct program does; the message names line and lanes."""
