"""Builds, gates, peers and measurements, for whoever works on these kernels; not in the wheel.

- A command of ``python -m lab`` is in ``cli``, a file each.
- What is compiled without a device: ``builds`` has the calls of each family, ``launches`` finds
  what they launch, ``build_matrix`` compiles and judges it, ``same_code`` compares two states.
- What is timed on a GPU: ``cases`` has the cases of operations, ``layer`` those of a decode layer,
  ``model_steps`` and ``full_size`` steps of whole models; ``peers`` has the libraries beside them.
- What is timed on a CPU: ``cpu``, and ``attention``.
- What documents show of recorded rows: ``page``.
"""
