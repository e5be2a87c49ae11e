"""Execute Triton and Gluon kernels for hardware that is not there.

Each way is a module or a package of its own:

- ``crossrun.interpreter``: Triton's own interpreter, repaired, so that numbers are those of a GPU;
- ``crossrun.hopper``: the text of Gluon kernels for Hopper, on a CPU;
- ``crossrun.intel``: what Intel's compiler makes of Triton kernels, on a CPU, by OpenCL;
- ``crossrun.amd``: what Triton's compiler makes for AMD's GPUs, on a CPU, by an interpreter;
- ``crossrun.ptx``: PTX of an older NVIDIA target, on a newer NVIDIA GPU.

``crossrun.targets`` compiles for a GPU that is not there. All of it works for any project's
kernels: nothing of anymla is imported.
"""
