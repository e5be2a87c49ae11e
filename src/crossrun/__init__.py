"""Execute Triton and Gluon kernels for hardware that is not there.

Each way is a package of its own:

- ``crossrun.hopper``: the text of Gluon kernels for Hopper, on a CPU.

They know no kernel of any project, and import nothing of anymla's.
"""
