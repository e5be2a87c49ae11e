"""The parts of the network as modules, structured as in the figures of the paper."""
