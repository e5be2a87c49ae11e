"""Names that other people's code calls, as thin adapters over ``anymla.ops``."""
