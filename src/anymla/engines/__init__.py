"""Adapters that run anymla inside serving engines; no other module imports them."""
