"""Cases of the benchmark runner, a module for each family of operations."""
