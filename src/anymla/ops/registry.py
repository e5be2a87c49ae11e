"""Operations: one contract, several backends, and registration with torch.library.

An interface file declares the contract as a function whose body only checks its arguments; backends
are registered on it afterwards. In eager mode a call is checked and then runs the chosen backend
directly; checks and choice are made once for each kind of call (``Operation.resolve``). While
torch.compile or export traces, a call goes through ``torch.ops.anymla.<name>`` instead. That
operator's schema takes the results as mutated arguments, so one fake kernel, which does nothing,
serves every operation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import operator
import sys
import threading
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from anymla.ops._check import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    check_cos_sin,
    first_unlike,
    overlaps,
    require,
    wide_dtype,
)
from anymla.ops._triton_keys import hash_callees_first
from anymla.ops.device import Support
from anymla.ops.streams import active_workspace

__all__ = [
    "FLOAT32_UP",
    "FLOATS",
    "INT32",
    "INT64",
    "Backend",
    "BackendUnavailable",
    "Operation",
    "Support",
    "check",
    "check_cos_sin",
    "operation",
    "require",
    "wide_dtype",
]

# Backends from best to worst; one that is not listed here only runs if it is named.
_PRIORITY = ("gluon_sm90", "vendor", "triton", "numba", "torch", "reference")
# Accelerator kernels, which run on CPU tensors (interpreted) only if they are named.
_ACCELERATED = ("gluon_sm90", "vendor", "triton")
# Kinds of call know addresses modulo this many bytes: the widest load, and TMA's alignment.
_ALIGNMENT = 16
_LISTS = (list, tuple)
_P = ParamSpec("_P")
_R = TypeVar("_R")
# Largest number of kinds of call that an operation remembers; prompts have many shapes.
_MOST_KINDS = 512


class BackendUnavailable(RuntimeError):
    """Error of a call that this machine or backend cannot run; the message says why."""


SUPPORTED = Support(True)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation, with the test of which calls it can run."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., Support] | None
    automatic: bool = True
    by_kind: bool = False

    def support(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Support:
        """Return support of a call by this backend; nothing is launched."""
        return SUPPORTED if self.supports is None else self.supports(*args, **kwargs)


class LazyFunction:
    """Function whose module is imported when it is first called or asked for its signature."""

    def __init__(self, module: str, name: str) -> None:
        """Name the function ``name`` of the module with dotted name ``module``."""
        self._module = module
        self._name = name
        self._run: Callable[..., Any] | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.load())

    def load(self) -> Callable[..., Any]:
        """Import the module if necessary and return the function."""
        if self._run is None:
            self._run = getattr(importlib.import_module(self._module), self._name)
            if "triton.runtime.jit" in sys.modules:
                hash_callees_first()
        return self._run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)


_skipped: ContextVar[bool] = ContextVar("skipped", default=False)


@contextlib.contextmanager
def skip_checks(skip: bool = True) -> Iterator[None]:
    """Skip checks of CPU tensors and of lists inside the context, if ``skip``.

    Meant for callers whose arguments follow from what has been checked, as an engine's steps follow
    from its weights and caches: in a small model's decode step, even recognising a known kind of
    call takes a twentieth of the time. Backends are then chosen by dtypes and sizes; all other
    calls are still checked by kind.
    """
    token = _skipped.set(skip)
    try:
        yield
    finally:
        _skipped.reset(token)


_ON_HOST = operator.attrgetter("dtype", "shape", "is_cpu")
_ON_DEVICE = operator.attrgetter("dtype", "shape", "device")


def _kind_of(
    args: Sequence[Any], kwargs: dict[str, Any], backend: str | None, *, asks: bool
) -> tuple[Any, ...] | None:
    """Return the kind of a call as ``Operation.resolve`` defines it; None if not to be remembered.

    Args:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call, without ``backend``.
        backend: name of the requested backend, or None.
        asks: True if backends will be asked, which look at more than contracts do.
    """
    facts: list[Any] = [backend]
    add = facts.append
    values = args
    if kwargs:
        facts += kwargs
        values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, Tensor):
            if asks:
                add(_ON_DEVICE(value))
                add(value.stride())
                # Both remainders fit in one number below 256.
                place = value.storage_offset() % _ALIGNMENT
                add(value.data_ptr() % _ALIGNMENT * _ALIGNMENT + place)
            else:
                add(_ON_HOST(value))
                if not value.is_contiguous():
                    add(value.stride())
        elif value is None:
            add(None)
        elif isinstance(value, _LISTS):
            if _is_struct(value) or (value and _is_struct(value[0])):
                nested = _kind_of(value, {}, None, asks=asks)
            elif asks or first_unlike(value) is not None:
                return None
            else:
                nested = _kind_of(value[:1], {}, None, asks=False)
            facts += type(value), len(value), nested
        else:
            facts += type(value), value
    return tuple(facts)


def _sizes_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a shorter kind of a call on CPU tensors, for choices that need no checks.

    Its first element is the type of this function, which no other kind begins with.
    """
    facts: list[Any] = [types.FunctionType]
    add = facts.append
    values = args
    if kwargs:
        facts += kwargs
        values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, Tensor):
            add(value.dtype)
            add(value.shape)
        elif isinstance(value, _LISTS):
            structs = _is_struct(value) or (value and _is_struct(value[0]))
            facts += type(value), len(value), _sizes_of(value if structs else value[:1], {})
        else:
            add(value)
    return tuple(facts)


def _is_struct(value: object) -> bool:
    """Return True for a NamedTuple, an argument that groups other arguments."""
    return hasattr(value, "_fields")


def _device_of(value: Any) -> torch.device | None:
    """Return the device of a tensor, a list of like tensors or structs; None for anything else."""
    while isinstance(value, _LISTS) and value:
        value = value[0]
    return value.device if isinstance(value, Tensor) else None


def _requires_grad(value: Any) -> bool:
    if isinstance(value, _LISTS):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


def signature_of_backends(contract: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a contract's backends: every parameter except ``backend``."""
    signature = inspect.signature(contract)
    kept = [each for name, each in signature.parameters.items() if name != "backend"]
    return signature.replace(parameters=kept)


class Operation(Generic[_P, _R]):
    """Callable with a contract and a table of backends; made by ``operation``.

    The class is generic in the contract's parameters and result, so that type checkers and editors
    know the keywords of a call.

    Attributes:
        name: name of the operation, which is also its name under ``torch.ops.anymla``.
    """

    def __init__(
        self,
        contract: Callable[_P, _R],
        mutates: tuple[str, ...],
        outputs: Callable[..., tuple[Tensor, ...]] | None,
    ) -> None:
        self.name = contract.__name__
        self._backends: dict[str, Backend] = {}
        self._automatic: tuple[Backend, ...] = ()
        self._hosts: tuple[Backend, ...] = ()  # for CPU tensors, if dtypes and shapes decide
        self._host: Backend | None = None  # CPU tensors' backend, if it takes every call
        self._resolved: dict[Hashable, Backend] = {}
        self._changing = threading.RLock()  # guards the tables above
        self._contract: Callable[..., Any] = contract
        self._outputs = outputs
        self._signature = signature_of_backends(contract)
        self._flat = FlatArguments(contract)
        self._leading = {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        # For each written form of a call: positional parameters that were not passed by position.
        self._forms: dict[tuple[Any, ...], list[str]] = {}
        self._mutates = mutates
        hints = self._flat.hints
        self._stacks = [name for name in hints if hints[name] == list[Tensor] | Tensor]
        places = {name: place for place, name in enumerate(self._leading)}
        self._written = tuple((name, places.get(name)) for name in mutates)
        functools.update_wrapper(self, contract)
        self.__signature__ = inspect.signature(contract)
        contract.__dict__["__signature__"] = self._signature  # the signature of backends

    def __repr__(self) -> str:
        return f"<operation {self.name}{self.__signature__}>"

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Registered backends by name, best first."""
        return types.MappingProxyType(self._backends)

    def register(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        supports: Callable[..., Support] | None = None,
        automatic: bool = True,
        by_kind: bool = False,
    ) -> None:
        """Add a backend.

        Args:
            name: name of the backend: "reference", "torch", "triton", ...
            run: function of the operation's arguments that returns its results.
            supports: function of the same arguments that returns whether ``run`` can take them;
                None if it always can. Its answer is remembered, so it must follow from what
                ``resolve`` lists, and from nothing that changes while the process runs.
            automatic: False to use this backend only where it is named, without asking it
                otherwise; for backends that this installation lacks.
            by_kind: True if ``supports`` looks only at dtypes and shapes of CPU tensors, so that no
                more has to be known of a call on them than if no backend were asked.
        """
        order = {known: place for place, known in enumerate(_PRIORITY)}
        with self._changing:
            made = self._backends | {name: Backend(name, run, supports, automatic, by_kind)}
            ranked = sorted(made.values(), key=lambda b: order.get(b.name, len(order)))
            asked = [each for each in ranked if each.name in _PRIORITY and each.automatic]
            self._set_backends(ranked, asked)

    def register_lazy(
        self,
        name: str,
        module: str,
        *,
        supports: Callable[..., Support] | None = None,
        automatic: bool = True,
        by_kind: bool = False,
    ) -> None:
        """Add a backend whose module is imported when it first runs.

        Args:
            name: name of the backend, as for ``register``.
            module: dotted name of a module with a function of the operation's name.
            supports: support function as for ``register``; it is called without importing the
                module.
            automatic: False to use this backend only where it is named.
            by_kind: True if ``supports`` looks only at dtypes and shapes of CPU tensors.
        """
        run = LazyFunction(module, self.name)
        self.register(name, run, supports=supports, automatic=automatic, by_kind=by_kind)

    def unregister(self, name: str) -> None:
        """Remove a backend."""
        with self._changing:
            rest = [each for each in self._backends.values() if each.name != name]
            self._set_backends(rest, [each for each in self._automatic if each.name != name])

    @contextlib.contextmanager
    def with_backends(self, backends: Iterable[Backend]) -> Iterator[None]:
        """Replace all backends inside the context by these, best first, whatever their names."""
        before = [*self._backends.values()], self._automatic
        given = [*backends]
        self._set_backends(given, given)
        try:
            yield
        finally:
            self._set_backends(*before)

    def _set_backends(self, ranked: Sequence[Backend], automatic: Sequence[Backend]) -> None:
        self._backends = {backend.name: backend for backend in ranked}
        self._automatic = tuple(automatic)
        host = [backend for backend in automatic if backend.name not in _ACCELERATED]
        self._host = host[0] if host and host[0].supports is None else None
        known = all(each.supports is None or each.by_kind for each in host)
        self._hosts = tuple(host) if known else ()
        self.forget()

    def forget(self) -> None:
        """Forget all resolved kinds of call, for callers that change what a device reports."""
        self._resolved.clear()

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Check the arguments, then run ``backend`` or the best backend that supports them.

        Raises:
            TypeError, ValueError: if the arguments break the contract.
            BackendUnavailable: if the named backend, or every backend, cannot run the call.
        """
        given: tuple[Any, ...] = args
        named: dict[str, Any] = kwargs
        backend: str | None = named.pop("backend", None)
        if torch.compiler.is_compiling():
            return self._call_traced(given, named, backend)
        chosen, given, named = self._resolve(given, named, backend)
        # numba's backends take no scratch memory, nor do CPU backends without an alternative.
        alone = chosen.name == "numba" or (chosen is self._host and given[0].is_cpu)
        workspace = None if alone else active_workspace()
        if workspace is None:
            return chosen.run(*given, **named)
        with workspace.scope():
            return chosen.run(*given, **named)

    def resolve(self, *args: _P.args, **kwargs: _P.kwargs) -> Backend:
        """Return the backend that a call runs on; nothing is launched.

        Arguments are checked, and backends asked, once for every kind of call: a call of a known
        kind goes straight to its backend, any other is checked and resolved again. Calls are of one
        kind if they name the same backend, or none, and agree in

        - which arguments are given, and type and value of every argument that is not a tensor;
        - dtype, shape and device of every tensor, and its strides if it is not contiguous;
        - where backends are asked, also the strides of every tensor, and its address and storage
          offset modulo 16. For CPU tensors, backends are only asked if one is named, or if some
          look at more than dtypes and shapes (``by_kind`` is False);
        - the length of a list, and dtype, shape and device of its first tensor, which all others
          must share. Where backends are asked, they see every tensor of a list, so such a call is
          of no known kind.

        So calls of one kind differ only in the values of their tensors. Tensors that require
        gradients are refused in every call.

        Raises:
            TypeError, ValueError: if the arguments break the contract.
            BackendUnavailable: if the named backend, or every backend, cannot run the call.
        """
        named: dict[str, Any] = kwargs
        return self._resolve(args, named, named.pop("backend", None))[0]

    def supports(self, *args: _P.args, **kwargs: _P.kwargs) -> Support:
        """Return support of a call on ``backend``, or on any; backends are asked each time.

        Raises:
            TypeError, ValueError: if the arguments break the contract.
        """
        named: dict[str, Any] = kwargs
        backend: str | None = named.pop("backend", None)
        try:
            self._choose(backend, *self._accept(args, named))
        except BackendUnavailable as unavailable:
            return Support(False, str(unavailable))
        return SUPPORTED

    def explain(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Support]]:
        """Explain the choice of a call's backend; every backend is asked each time.

        Returns:
            Name of the backend that ``backend=None`` takes (None if none can), and every backend's
            answer.

        Raises:
            TypeError, ValueError: if the arguments break the contract.
        """
        args, kwargs = self._accept(args, kwargs)
        answers = {name: each.support(args, kwargs) for name, each in self._backends.items()}
        picked = (b.name for b in self._automatic if answers[b.name] and answers[b.name].automatic)
        return next(picked, None), answers

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None
    ) -> tuple[Backend, tuple[Any, ...], dict[str, Any]]:
        """Return the backend of a call, and its arguments in the form that backends take."""
        given = args, kwargs
        if kwargs and len(args) < len(self._leading):
            args, kwargs = self._by_position(args, kwargs)
        first = args[0] if args else None
        on_host = backend is None and isinstance(first, Tensor) and first.is_cpu
        host = self._host if on_host else None
        skips = _skipped.get()
        if host is not None and skips:
            return self._imported(host), args, kwargs
        asks = not on_host or not self._hosts
        kind: tuple[Any, ...] | None
        if skips and not asks:
            kind = _sizes_of(args, kwargs)
        else:
            kind = _kind_of(args, kwargs, backend, asks=asks)
        try:
            found = self._resolved.get(kind)
        except TypeError:  # an argument has no hash; the contract refuses it by name
            found = kind = None
        if found is not None:
            if torch.is_grad_enabled():
                self._refuse_gradients(args, kwargs)
            return found, args, kwargs
        if kind is not None or not skips:
            args, kwargs = self._accept(*given)
        asked = self._automatic if asks else self._hosts
        found = self._imported(host or self._choose(backend, args, kwargs, asked))
        if kind is not None:
            if len(self._resolved) >= _MOST_KINDS:
                self._resolved.clear()
            self._resolved[kind] = found
        return found, args, kwargs

    def _imported(self, chosen: Backend) -> Backend:
        """Return the backend with its lazy function imported, and keep it in the tables."""
        if not isinstance(chosen.run, LazyFunction):
            return chosen
        made = dataclasses.replace(chosen, run=chosen.run.load())
        with self._changing:
            ranked, automatic = (
                [made if each is chosen else each for each in table]
                for table in (self._backends.values(), self._automatic)
            )
            self._set_backends(ranked, automatic)
        return made

    def _accept(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments and return them in the form that backends take."""
        for name in kwargs.keys() - self._signature.parameters.keys():
            known = list(self._signature.parameters)
            near = difflib.get_close_matches(name, known, n=1)
            said = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{self.name}: no argument {name!r}: {said}")
        self._contract(*args, **kwargs)
        self._check_devices(args, kwargs)
        if kwargs and len(args) < len(self._leading):
            args, kwargs = self._by_position(args, kwargs)
        if self._written:
            self._check_written(args, kwargs)
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        return args, kwargs

    def _by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every positional parameter passed by position."""
        form = len(args), *kwargs
        missing = self._forms.get(form)
        if missing is None:
            missing = list(self._leading)[len(args) :]
            while missing and missing[-1] not in kwargs:
                missing.pop()
            self._forms[form] = missing
        if not missing:
            return args, kwargs
        rest = dict(kwargs)
        return (*args, *(rest.pop(name, self._leading[name]) for name in missing)), rest

    def _check_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, place in self._written:
            if place is None:
                written = kwargs.get(name)
            else:
                written = args[place] if place < len(args) else None
            if written is not None and overlaps(written):
                got = f"{list(written.shape)} of strides {list(written.stride())}"
                require(False, self.name, name, "of elements that do not overlap", got)

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Require one device for all tensors; a contract compares only those it checks together."""
        if len({*map(_device_of, args), *map(_device_of, kwargs.values()), None}) <= 2:
            return
        given = self._signature.bind(*args, **kwargs).arguments
        devices = [(name, _device_of(value)) for name, value in given.items()]
        first = next(device for _, device in devices if device is not None)
        for name, device in devices:
            require(device in (None, first), self.name, name, f"on {first}", device)

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse tensors that require gradients, which would be lost since there is no backward."""
        if not any(map(_requires_grad, (*args, *kwargs.values()))):
            return
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if _requires_grad(value):
                expected = "detached or used under torch.no_grad() (there is no backward)"
                require(False, self.name, name, expected, "requires_grad=True")

    def _choose(
        self,
        name: str | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        asked: Sequence[Backend] | None = None,
    ) -> Backend:
        if name is not None:
            if name not in self._backends:
                known = ", ".join(self._backends)
                raise BackendUnavailable(f"{self.name}: no backend {name!r}; there are: {known}")
            support = self._backends[name].support(args, kwargs)
            if not support:
                raise BackendUnavailable(f"{self.name}: backend {name!r}: {support.reason}")
            return self._backends[name]
        reasons = []
        for backend in self._automatic if asked is None else asked:
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
        for name in self._stacks:
            if isinstance(arguments[name], Tensor):
                arguments[name] = list(arguments[name].unbind())
        results = () if self._outputs is None else self._outputs(**arguments)
        packet = getattr(torch.ops.anymla, self.name)
        packet(**self._flat.flatten(arguments), backend=backend, results=list(results))
        if self._outputs is None:
            return None
        return results[0] if len(results) == 1 else results

    def _run_registered(
        self, *args: Any, results: Sequence[Tensor], backend: str | None = None, **kwargs: Any
    ) -> None:
        # torch.library passes keyword arguments by position where the schema allows it.
        call: Callable[..., Any] = self
        given = call(**self._flat.restore(args, kwargs), backend=backend)
        if self._outputs is None:
            return
        produced = given if isinstance(given, tuple) else (given,)
        for result, value in zip(results, produced, strict=True):
            if result.data_ptr() != value.data_ptr() or not value.numel():
                result.copy_(value)

    def schema(self) -> str:
        """Return the operator's schema in torch.library's language, without its name."""
        return self._flat.schema(self._mutates)


def operation(
    *,
    mutates: tuple[str, ...] = (),
    outputs: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[[Callable[_P, _R]], Operation[_P, _R]]:
    """Turn a contract function into an Operation and register it with torch.library.

    Args:
        mutates: names of the tensor arguments that the operation writes.
        outputs: for operations that return tensors, a function of all arguments by name that
            allocates the results (uninitialised, of the right shape and dtype) while tracing.

    Returns:
        A decorator for the contract: a function of the operation's arguments, annotated with
        Tensor, int, float, bool, str, their optionals, list[Tensor], or a NamedTuple of such
        (or None, or a Sequence of them), the first one a Tensor, whose body checks them.
        Its last keyword ``backend: str | None = None`` is the operation's own: callers may give
        it, and neither the body nor a backend gets it.
    """

    def decorate(contract: Callable[_P, _R]) -> Operation[_P, _R]:
        made = Operation(contract, mutates, outputs)
        qualified = f"anymla::{made.name}"
        torch.library.define(qualified, made.schema())
        torch.library.impl(qualified, "default", made._run_registered)
        torch.library.register_fake(qualified, lambda *args, **kwargs: None)
        return made

    return decorate


_SCALARS = {int: "SymInt", float: "float", bool: "bool", str: "str"}


class FlatArguments:
    """The flat form of a contract's arguments, as torch.library's schemas take them.

    An argument that is a NamedTuple becomes one argument for each field, called
    ``<argument>_<field>``, and a sequence of NamedTuples one list for each field. All other
    arguments stay as they are.
    """

    def __init__(self, contract: Callable[..., Any]) -> None:
        """Read the annotations of a contract function."""
        self._parameters = signature_of_backends(contract).parameters
        self._structs: dict[str, tuple[Any, bool]] = {}  # type, and True for a sequence
        self.hints: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        hints = typing.get_type_hints(contract)
        for name, parameter in self._parameters.items():
            struct, many = _struct_in(hints[name])
            if struct is None:
                self.hints[name] = hints[name]
                parameters.append(parameter)
                continue
            self._structs[name] = struct, many
            for field, hint in typing.get_type_hints(struct).items():
                flat = f"{name}_{field}"
                self.hints[flat] = types.GenericAlias(list, (hint,)) if many else hint | None
                parameters.append(parameter.replace(name=flat))
        self._signature = inspect.Signature(parameters)

    def flatten(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by their flat names."""
        flat: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in self._structs:
                flat[name] = value
                continue
            struct, many = self._structs[name]
            for place, field in enumerate(struct._fields):
                if many:
                    flat[f"{name}_{field}"] = [each[place] for each in value]
                else:
                    flat[f"{name}_{field}"] = None if value is None else value[place]
        return flat

    def restore(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the contract's arguments by name from a call in flat form."""
        # torch.library passes keyword arguments by position where the schema allows it.
        flat = self._signature.bind(*args, **kwargs).arguments
        given: dict[str, Any] = {}
        for name in self._parameters:
            if name not in self._structs:
                if name in flat:
                    given[name] = flat[name]
                continue
            struct, many = self._structs[name]
            fields = [flat.get(f"{name}_{field}") for field in struct._fields]
            if many:
                given[name] = [struct(*each) for each in zip(*fields, strict=True)]
            elif fields[0] is not None:
                given[name] = struct(*fields)
        return given

    def schema(self, mutates: tuple[str, ...]) -> str:
        """Return the schema without its name; results are written arguments.

        Args:
            mutates: names of the tensor arguments that the operation writes.
        """
        words: list[str] = []
        keyword_only = False
        alias = iter("abcdefghijklmnopqrstuvwxyz")
        for parameter in self._signature.parameters.values():
            name = parameter.name
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
                keyword_only = True
                words.append("*")
            mark = f"({next(alias)}!)" if name in mutates else ""
            word = f"{_schema_type(self.hints[name], mark)} {name}"
            default = parameter.default
            if default is not inspect.Parameter.empty:
                word += f"={_schema_default(default)}"
            words.append(word)
        if not keyword_only:
            words.append("*")
        words += ["str? backend=None", f"Tensor({next(alias)}!)[] results"]
        return f"({', '.join(words)}) -> ()"


def _struct_in(hint: Any) -> tuple[Any, bool]:
    """Return the NamedTuple of an annotation (or None) and True if it is a sequence of them."""
    many = typing.get_origin(hint) is Sequence
    members = typing.get_args(hint) or (hint,)
    found = [each for each in members if _is_struct(each)]
    return (found[0], many) if found else (None, False)


def _schema_type(hint: Any, mark: str) -> str:
    optional = ""
    if hint == list[Tensor] | Tensor:
        hint = list[Tensor]
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
