"""An operation: one contract, several backends, registered with torch.library.

An interface file declares the contract as a function whose body only checks its arguments; backends
are registered on it afterwards. In eager mode a call runs the checks and then the chosen backend,
with nothing in between. While torch.compile or export traces, it goes through
``torch.ops.anymla.<name>`` instead, whose schema takes the results as mutated arguments, so that
the fake kernel is the same for all of them: it does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from anymla.ops._check import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    check_cos_sin,
    overlaps,
    require,
)
from anymla.ops.streams import active_workspace

__all__ = [
    "FLOAT32_UP",
    "FLOATS",
    "INT32",
    "INT64",
    "BackendUnavailable",
    "Operation",
    "Support",
    "check",
    "check_cos_sin",
    "operation",
    "require",
]

# Best first; a backend that is not listed here is only used when it is named.
_PRIORITY = ("gluon_sm90", "vendor", "triton", "torch", "reference")
# Kernels for accelerators, which on CPU tensors only run (interpreted) when they are named: not
# even asking them saves a fifth of a small operation's time there.
_ACCELERATED = ("gluon_sm90", "vendor", "triton")


class BackendUnavailable(RuntimeError):
    """This machine, or this backend, cannot run this call; the message says why."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a backend can run a call, and if not, why.

    Attributes:
        ok: it can.
        reason: why not.
        automatic: it may be chosen without having been named.
    """

    ok: bool
    reason: str = ""
    automatic: bool = True

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Support(True)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., Support] | None

    def support(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Support:
        """Whether this backend can run the call; nothing is launched."""
        return SUPPORTED if self.supports is None else self.supports(*args, **kwargs)


class LazyFunction:
    """A function whose module is imported when it is first called, or asked for its signature."""

    def __init__(self, module: str, name: str) -> None:
        """``name`` in the module of that dotted name."""
        self._module = module
        self._name = name
        self._run: Callable[..., Any] | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    def _load(self) -> Callable[..., Any]:
        if self._run is None:
            self._run = getattr(importlib.import_module(self._module), self._name)
        return self._run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)


_skipped: ContextVar[bool] = ContextVar("skipped", default=False)


@contextlib.contextmanager
def skip_checks(known: bool) -> Iterator[None]:
    """Skip the checks of arguments inside, if ``known``.

    For a caller that repeats what has passed them, in the same shapes and dtypes: of a decode step
    of a small model on a CPU, checks take a tenth.
    """
    token = _skipped.set(known)
    try:
        yield
    finally:
        _skipped.reset(token)


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


class Operation:
    """A callable with a contract and a table of backends; made by ``operation``.

    Attributes:
        name: name of the operation, also under ``torch.ops.anymla``.
        backends: the registered implementations by name, best first.
    """

    def __init__(
        self,
        contract: Callable[..., None],
        mutates: tuple[str, ...],
        outputs: Callable[..., tuple[Tensor, ...]] | None,
    ) -> None:
        self.name = contract.__name__
        self.backends: dict[str, Backend] = {}
        self._host: Backend | None = None  # what CPU tensors take, if it needs no asking
        self._contract = contract
        self._outputs = outputs
        self._signature = inspect.signature(contract)
        self._leading = {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        self._mutates = mutates
        places = {name: place for place, name in enumerate(self._leading)}
        self._written = tuple((name, places.get(name)) for name in mutates)
        functools.update_wrapper(self, contract)

    def register(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        supports: Callable[..., Support] | None = None,
    ) -> None:
        """Add a backend.

        Args:
            name: "reference", "torch", "triton", ...
            run: called with the operation's arguments; returns its results.
            supports: called with the same arguments, answers whether ``run`` can take them.
        """
        self.backends[name] = Backend(name, run, supports)
        order = {known: place for place, known in enumerate(_PRIORITY)}
        ranked = sorted(self.backends.values(), key=lambda b: order.get(b.name, len(order)))
        self.backends = {backend.name: backend for backend in ranked}
        host = [b for b in ranked if b.name in _PRIORITY and b.name not in _ACCELERATED]
        self._host = host[0] if host and host[0].supports is None else None

    def register_lazy(
        self, name: str, module: str, *, supports: Callable[..., Support] | None = None
    ) -> None:
        """Add a backend whose module is imported when it first runs.

        Args:
            name: as for ``register``.
            module: dotted name of a module with a function of the operation's name.
            supports: as for ``register``; answered without importing the module.
        """
        self.register(name, LazyFunction(module, self.name), supports=supports)

    def __call__(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Check the arguments and run; ``backend=None`` takes the best that supports the call.

        Raises:
            TypeError, ValueError: the arguments break the contract.
            BackendUnavailable: the named backend, or every backend, cannot run the call.
        """
        if torch.compiler.is_compiling():
            return self._call_traced(args, kwargs, backend)
        args, kwargs = self._accept(args, kwargs, known=_skipped.get())
        if backend is None and self._host is not None and args:
            first = args[0]
            if isinstance(first, Tensor) and first.is_cpu:
                return self._host.run(*args, **kwargs)
        chosen = self._choose(backend, args, kwargs)
        workspace = active_workspace()
        if workspace is None:
            return chosen.run(*args, **kwargs)
        with workspace.scope():
            return chosen.run(*args, **kwargs)

    def supports(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Support:
        """Whether the call could run (on ``backend``, or on any), without launching it.

        Raises:
            TypeError, ValueError: the arguments break the contract.
        """
        args, kwargs = self._accept(args, kwargs)
        try:
            self._choose(backend, args, kwargs)
        except BackendUnavailable as unavailable:
            return Support(False, str(unavailable))
        return SUPPORTED

    def explain(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Support]]:
        """Which backend a call would take, and what each says about it; nothing is launched.

        Returns:
            The name that ``backend=None`` takes (None for none), and every backend's answer.

        Raises:
            TypeError, ValueError: the arguments break the contract.
        """
        args, kwargs = self._accept(args, kwargs)
        answers = {name: each.support(args, kwargs) for name, each in self.backends.items()}
        picked = [name for name, each in answers.items() if each and each.automatic]
        return next((name for name in picked if name in _PRIORITY), None), answers

    def _accept(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, known: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, unless they are ``known``, and pass them as backends take them."""
        if not known:
            self._contract(*args, **kwargs)
        if kwargs and len(args) < len(self._leading):
            args, kwargs = self._by_position(args, kwargs)
        if not known:
            if self._written:
                self._check_written(args, kwargs)
            if torch.is_grad_enabled():
                self._refuse_gradients(args, kwargs)
        return args, kwargs

    def _by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, with everything that has a position passed by it."""
        missing = list(self._leading)[len(args) :]
        while missing and missing[-1] not in kwargs:
            missing.pop()
        rest = dict(kwargs)
        return (*args, *(rest.pop(name, self._leading[name]) for name in missing)), rest

    def _check_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, place in self._written:
            written = kwargs.get(name) if place is None else args[place]
            if written is not None and overlaps(written):
                got = f"{list(written.shape)} of strides {list(written.stride())}"
                require(False, self.name, name, "of elements that do not overlap", got)

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Operations have no backward: what they return would be cut off in silence."""
        if not any(map(_requires_grad, (*args, *kwargs.values()))):
            return
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if _requires_grad(value):
                expected = "detached or used under torch.no_grad() (there is no backward)"
                require(False, self.name, name, expected, "requires_grad=True")

    def _choose(self, name: str | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Backend:
        if name is not None:
            if name not in self.backends:
                known = ", ".join(self.backends)
                raise BackendUnavailable(f"{self.name}: no backend {name!r}; there are: {known}")
            support = self.backends[name].support(args, kwargs)
            if not support:
                raise BackendUnavailable(f"{self.name}: backend {name!r}: {support.reason}")
            return self.backends[name]
        reasons = []
        for backend in self.backends.values():
            if backend.name not in _PRIORITY:
                continue
            support = backend.support(args, kwargs)
            if support and support.automatic:
                return backend
            reasons.append(f"{backend.name}: {support.reason}")
        raise BackendUnavailable(
            f"{self.name}: no backend can run this call ({'; '.join(reasons)})"
        )

    def _call_traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None
    ) -> Any:
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        results = () if self._outputs is None else self._outputs(**arguments)
        packet = getattr(torch.ops.anymla, self.name)
        packet(**arguments, backend=backend, results=list(results))
        if self._outputs is None:
            return None
        return results[0] if len(results) == 1 else results

    def _run_registered(
        self, *args: Any, results: Sequence[Tensor], backend: str | None = None, **kwargs: Any
    ) -> None:
        # torch.library hands keyword arguments over by position where the schema allows it.
        bound = self._signature.bind(*args, **kwargs)
        given = self(*bound.args, backend=backend, **bound.kwargs)
        if self._outputs is None:
            return
        produced = given if isinstance(given, tuple) else (given,)
        for result, value in zip(results, produced, strict=True):
            if result.data_ptr() != value.data_ptr() or not value.numel():
                result.copy_(value)

    def schema(self) -> str:
        """The operator's schema in the language of torch.library, without its name."""
        return schema_of(self._contract, self._mutates)


def operation(
    *,
    mutates: tuple[str, ...] = (),
    outputs: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Operation]:
    """Turn a contract function into an Operation and register it with torch.library.

    Args:
        mutates: names of the tensor arguments that are written.
        outputs: for operations that return tensors, a function of all arguments by name that
            allocates the results (empty, right shape and dtype); used while tracing.

    Returns:
        A decorator for the contract: a function of the operation's arguments, annotated with
        Tensor, int, float, bool, str, their optionals, or list[Tensor], whose body checks them.
    """

    def decorate(contract: Callable[..., Any]) -> Operation:
        made = Operation(contract, mutates, outputs)
        qualified = f"anymla::{made.name}"
        torch.library.define(qualified, made.schema())
        torch.library.impl(qualified, "default", made._run_registered)
        torch.library.register_fake(qualified, lambda *args, **kwargs: None)
        return made

    return decorate


_SCALARS = {int: "SymInt", float: "float", bool: "bool", str: "str"}


def schema_of(contract: Callable[..., Any], mutates: tuple[str, ...]) -> str:
    """The schema of a contract function, without its name; its results are written arguments.

    Args:
        contract: annotated with Tensor, int, float, bool, str, their optionals, or list[Tensor].
        mutates: names of the tensor arguments that are written.
    """
    hints = typing.get_type_hints(contract)
    words: list[str] = []
    keyword_only = False
    alias = iter("abcdefghijklmnopqrstuvwxyz")
    for name, parameter in inspect.signature(contract).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        mark = f"({next(alias)}!)" if name in mutates else ""
        word = f"{_schema_type(hints[name], mark)} {name}"
        default = parameter.default
        if default is not inspect.Parameter.empty:
            word += f"={_schema_default(default)}"
        words.append(word)
    if not keyword_only:
        words.append("*")
    words += ["str? backend=None", f"Tensor({next(alias)}!)[] results"]
    return f"({', '.join(words)}) -> ()"


def _schema_type(hint: Any, mark: str) -> str:
    optional = ""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        optional = "?"
    if typing.get_origin(hint) is list:
        (member,) = typing.get_args(hint)
        return f"{_schema_type(member, mark)}[]{optional}"
    if hint is Tensor:
        return f"Tensor{mark}{optional}"
    return _SCALARS[hint] + optional


def _schema_default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
