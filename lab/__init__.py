"""Builds, gates, peers and measurements, for whoever works on these kernels; not in the wheel."""
