"""The parts of the network as modules that read like the figures of the paper."""
