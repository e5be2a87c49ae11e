"""Colours of the drawings by name, for a light and a dark scheme, as CSS variables."""

from __future__ import annotations

LIGHT = {
    "ink": "#1b2430",
    "soft": "#5a6675",
    "paper": "#fbfbf9",
    "card": "#fffffe",
    "rule": "#dfe3e8",
    "bad": "#b3261e",
    "c0": "#0067b1",
    "c1": "#c2410c",
    "c2": "#137a4a",
    "c3": "#8a2d8f",
    "c4": "#8a6d00",
    "c5": "#00757f",
}
DARK = {
    "ink": "#e7ebf0",
    "soft": "#a3afbd",
    "paper": "#12161c",
    "card": "#1a2028",
    "rule": "#333d49",
    "bad": "#ff8a80",
    "c0": "#6cb8ff",
    "c1": "#ff9d5c",
    "c2": "#5fd49a",
    "c3": "#d99bdf",
    "c4": "#e3c44a",
    "c5": "#4fd0dc",
}
assert LIGHT.keys() == DARK.keys()
assert len(set(LIGHT.values())) == len(LIGHT)  # `draw` finds a colour's name by its value


def variables(colours: dict[str, str]) -> str:
    """Return CSS declarations that set a variable for each colour."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
