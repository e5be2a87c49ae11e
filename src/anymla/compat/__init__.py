"""Other libraries' interfaces as thin adapters over ``anymla.ops``."""
