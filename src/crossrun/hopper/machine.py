"""Run Gluon kernels on a CPU."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from crossrun.hopper.cta import Cta
from crossrun.hopper.errors import NotModelled
from crossrun.hopper.global_memory import GlobalMemory
from crossrun.hopper.language import Constexpr, Language, loop
from crossrun.hopper.nvidia import Descriptor, Hopper
from crossrun.hopper.ptx import RawShared
from crossrun.hopper.values import Value, as_value


class Machine:
    """A CPU that runs Gluon kernels; see ``crossrun.hopper``.

    Attributes:
        memory: global memory that kernels access.
        cta: CTA that is running.
        raw: shared memory that inline PTX of the running CTA declares.
        program: index of the running program in the grid.
        grid: number of programs in each dimension.
    """

    def __init__(
        self,
        *,
        seed: int | None = 0,
        num_warps: int = 4,
        replacements: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        """Make a machine.

        Args:
            seed: seed of the interleavings. With None, a partition runs until it waits, and copies
                land when somebody waits for them.
            num_warps: number of warps of kernels, or of a specialised kernel's first partition.
            replacements: Python functions to run instead of device functions, by device function.
        """
        self.memory = GlobalMemory()
        self.program: tuple[int, ...] = (0, 0, 0)
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.num_warps = num_warps
        self._seed = seed
        self._language = Language(self)
        self._hopper = Hopper(self)
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._replacements = [*(replacements or {}).items()]
        self._stand_ins = {id(real): made for real, made in self._made_for()}
        self.begin((0, 0, 0), "a device function")

    def _made_for(self) -> Iterable[tuple[Any, Any]]:
        """Yield objects of Gluon with their stand-ins."""
        yield gl, self._language
        yield gl.constexpr, Constexpr
        for module in (hopper, ampere):
            yield module, self._hopper
            for name in dir(Hopper):
                if not name.startswith("_") and hasattr(module, name):
                    yield getattr(module, name), getattr(self._hopper, name)
        pairs: list[tuple[Any, Any]] = [
            (gl, self._language),
            (hopper.mbarrier, self._hopper.mbarrier),
            (hopper.tma, self._hopper.tma),
            (hopper.async_copy, self._hopper.async_copy),
            (ampere.async_copy, self._hopper.async_copy),
        ]
        for real, made in pairs:
            yield real, made
            for name in {*vars(type(made)), *vars(made)}:
                if not name.startswith("_") and hasattr(real, name):
                    yield getattr(real, name), getattr(made, name)

    # Translation.

    def translated(self, x: Any, name: str = "") -> Any:
        """Return the stand-in of an object that a kernel's text names."""
        for real, made in self._replacements:
            if x is real:
                return self.translated(made) if _is_device_function(made) else made
        if id(x) in self._stand_ins:
            return self._stand_ins[id(x)]
        if type(x).__name__ == "constexpr" and hasattr(x, "value"):
            return self.translated(x.value)
        if type(x) in (tuple, list):
            return type(x)(self.translated(each) for each in x)
        if _is_device_function(x):
            runs = type(x).__name__ != "ConstexprFunction"
            return self._once(x, lambda: self._function(x.fn, on_device=runs))
        if getattr(x, "__triton_aggregate__", False):
            return self._once(x, lambda: self._aggregate(x))
        if getattr(x, "__triton_builtin__", False) and not isinstance(x, type):
            return _missing(name or getattr(x, "__name__", str(x)))
        return x

    def _once(self, x: Any, make: Callable[[], Any]) -> Any:
        if id(x) not in self._functions:
            made: list[Any] = []

            # Functions may refer to each other.
            def forward(*args: Any, **kwargs: Any) -> Any:
                return made[0](*args, **kwargs)

            self._functions[id(x)] = (x, forward)
            made.append(make())
            self._functions[id(x)] = (x, made[0])
        return self._functions[id(x)][1]

    def _function(
        self, function: Callable[..., Any], *, on_device: bool = True
    ) -> Callable[..., Any]:
        """Rebuild a function from its code, with names that refer to stand-ins."""
        if not isinstance(function, types.FunctionType):
            return function
        names: dict[str, Any] = {
            "__builtins__": __builtins__,
            "__name__": function.__module__,
        }
        if on_device:
            names["range"] = loop
        for name in _names(function.__code__):
            if name in function.__globals__:
                names[name] = self.translated(function.__globals__[name], name)
        defaults = function.__defaults__
        made = types.FunctionType(
            function.__code__,
            names,
            function.__name__,
            None if defaults is None else tuple(self.translated(each) for each in defaults),
            function.__closure__,
        )
        if function.__kwdefaults__:
            made.__kwdefaults__ = {
                name: self.translated(each) for name, each in function.__kwdefaults__.items()
            }
        return made

    def _aggregate(self, aggregate: Any) -> type:
        """Make a class with an aggregate's fields and methods."""
        names = list(getattr(aggregate, "__annotations__", {}))
        init = getattr(aggregate.hash_attrs[0], "fn", aggregate.hash_attrs[0])
        members: dict[str, Any] = {}
        for name, member in inspect.getmembers(aggregate):
            if _is_device_function(member) and name != "__init__":
                members[name] = self._function(member.fn)
        if init.__closure__:  # a closure over the fields

            def fill(made: Any, *args: Any, **kwargs: Any) -> None:
                for name, each in (*zip(names, args, strict=False), *kwargs.items()):
                    setattr(made, name, each)

            members["__init__"] = fill
        else:
            members["__init__"] = self._function(init)
        return type(aggregate.__name__, (), members)

    # Running.

    def pointer(self, tensor: Tensor) -> Value:
        """Return a pointer to a tensor, as a kernel's argument."""
        return self.memory.pointer(tensor)

    def function(self, device_function: Any) -> Callable[..., Any]:
        """Return a device function as a Python function, to call outside a launch.

        Its arguments are those of kernels (see ``argument``), or results of other functions.
        """
        made: Callable[..., Any] = self.translated(device_function)
        return made

    def argument(self, x: Any) -> Any:
        """Convert an argument of a launch: tensors become pointers, numbers become values."""
        if isinstance(x, Tensor):
            return self.pointer(x)
        if isinstance(x, bool | int | float):
            return as_value(x)
        if isinstance(x, tuple | list):
            return tuple(self.argument(each) for each in x)
        if type(x).__name__ == "constexpr":
            return x.value
        if hasattr(x, "block_shape") and not isinstance(x, Descriptor):
            return Descriptor(x.base, list(x.block_shape), x.layout)
        return x

    def begin(self, program: tuple[int, ...], name: str) -> Cta:
        """Begin a program: make its CTA and its shared memory."""
        seed = None if self._seed is None else hash((self._seed, *program)) & 0xFFFFFFFF
        self.program = program
        self.cta = Cta(seed, name, self.num_warps)
        self.raw = RawShared(seed)
        return self.cta

    def launch(self, kernel: Any, grid: int | tuple[int, ...], *args: Any, **kwargs: Any) -> int:
        """Run a kernel's programs, one after the other.

        Args:
            kernel: function decorated with ``gluon.jit``.
            grid: number of programs in each of up to three dimensions.
            args: tensors on the CPU, numbers, descriptors, and constexprs.
            kwargs: keyword arguments of the same types.

        Returns:
            Number of operations on shared memory and barriers.

        Raises:
            Deadlock: if partitions wait for ever.
            Hazard: if accesses are not ordered, or an operation is not allowed.
            NotModelled: if the kernel uses a feature that is not modelled.
        """
        sizes = (grid,) if isinstance(grid, int) else tuple(grid)
        self.grid = (*sizes, 1, 1)[:3]
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {
            name: self.translated(x)
            if _is_constexpr(signature.parameters[name])
            else self.argument(x)
            for name, x in bound.arguments.items()
        }
        function, steps = self.function(kernel), 0
        for program in itertools.product(*(range(n) for n in reversed(self.grid))):
            cta = self.begin(program[::-1], kernel.fn.__name__)
            function(**given)
            cta.end()
            steps += cta.steps
        return steps


def run(
    kernel: Any,
    grid: int | tuple[int, ...],
    *args: Any,
    seed: int | None = 0,
    num_warps: int = 4,
    replacements: Mapping[Any, Callable[..., Any]] | None = None,
    **kwargs: Any,
) -> int:
    """Run a kernel on a CPU once; see ``Machine`` and its ``launch`` for the arguments."""
    machine = Machine(seed=seed, num_warps=num_warps, replacements=replacements)
    return machine.launch(kernel, grid, *args, **kwargs)


def _is_device_function(x: Any) -> bool:
    function = getattr(x, "fn", None)
    return isinstance(function, types.FunctionType) and not isinstance(x, types.MethodType)


def _is_constexpr(parameter: inspect.Parameter) -> bool:
    note = parameter.annotation
    return "constexpr" in (note if isinstance(note, str) else getattr(note, "__name__", ""))


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Collect all names that a function and its inner functions may look up in their module."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _missing(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotModelled(f"{name} is not modelled")

    return missing
