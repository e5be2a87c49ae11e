"""The CPU suite of ``python -m lab cpu``: what a CPU does, beside a ceiling of it or a library."""
