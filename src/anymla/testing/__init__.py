"""Oracle, tolerances, hostile inputs and conformance cases, for our tests and for others."""
