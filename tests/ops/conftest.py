"""Makes what stands in this folder importable from the families' folders."""
