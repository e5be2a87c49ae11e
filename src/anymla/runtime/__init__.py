"""Page pools, step plans, scheduling and sampling on one device."""
