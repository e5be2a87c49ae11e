"""Run the arithmetic of Gluon functions on the host: the kernel's own text, with torch for Gluon.

Only scalars, vectors and loads are there: enough for what decides who computes what.
"""

import pathlib
import sys
import types

import torch

import anymla.ops.sparse_attention as family


class Pointer:
    """A pointer to int32 values."""

    def __init__(self, values, at=0):
        self.values = values
        self.at = at

    def __add__(self, offset):
        return Pointer(self.values, self.at + offset)

    def to(self, _):
        return self


class Language(types.ModuleType):
    """What stands for ``triton.experimental.gluon.language``."""

    int32, int64, uint32 = torch.int32, torch.int64, torch.int64
    constexpr = staticmethod(lambda x: x)
    tensor = object

    def __init__(self):
        super().__init__("gl")
        self.program, self.programs = 0, 1

    def program_id(self, _):
        return torch.tensor(self.program)

    def num_programs(self, _):
        return torch.tensor(self.programs)

    def arange(self, start, end, layout=None):
        return torch.arange(start, end)

    def load(self, pointer, mask=None, other=0):
        at = torch.as_tensor(pointer.at)
        if mask is None:
            return pointer.values[at]
        inside = pointer.values[torch.where(torch.as_tensor(mask), at, 0)]
        return torch.where(torch.as_tensor(mask), inside, other)

    def where(self, condition, a, b):
        return torch.where(*(torch.as_tensor(x) for x in (condition, a, b)))

    def minimum(self, a, b):
        return torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    def maximum(self, a, b):
        return torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    def sum(self, x, axis):
        return x.sum(axis)

    def max(self, x, axis):
        return x.amax(axis)

    def associative_scan(self, x, axis, combine):
        return x.cumsum(axis)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def lists_module():
    """The names of ``gluon_sm90_lists`` as functions of the host, and the language they use."""
    language = Language()
    gluon = types.ModuleType("gluon")
    gluon.jit = gluon.constexpr_function = lambda f: f
    gluon.language = language
    core = types.ModuleType("core")
    core._aggregate = lambda cls: cls
    triton = types.ModuleType("triton")
    triton.__version__ = "3.6.0"
    experimental = types.ModuleType("experimental")
    experimental.gluon = gluon
    stand_ins = {
        "triton": triton,
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.language": types.ModuleType("language"),
        "triton.language.core": core,
    }
    path = pathlib.Path(family.__file__).with_name("gluon_sm90_lists.py")
    real = {name: sys.modules.get(name) for name in stand_ins}
    names = {"__name__": "gluon_sm90_lists_on_host"}
    sys.modules.update(stand_ins)
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    finally:
        for name, module in real.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return types.SimpleNamespace(**names), language
