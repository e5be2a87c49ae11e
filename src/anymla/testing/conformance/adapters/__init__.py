"""Adapters that put other libraries behind the contracts of this package's operations.

An adapter translates arguments and nothing else. It translates conventions that a library's
documentation states (the index that means "nothing", the lse of an empty row, the number of heads
per call), and lists them in ``translates``. For features that the library does not claim it raises
``NotApplicable``. All else is the library's own answer.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from anymla.ops.registry import BackendUnavailable
from anymla.testing.conformance.registry import Case
from anymla.testing.tolerance import Bound

_KNOWN = ("flash_mla", "deep_gemm", "cudnn_frontend", "vllm_xpu", "compat")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A library as operations of this package.

    Attributes:
        name: name of the library.
        version: version that the library reports, "" if none.
        functions: functions by operation, called with the operation's arguments; each may raise
            ``NotApplicable``.
        translates: conventions that the adapter translates, one line each.
        excused: reason, by case, why the case does not apply to the library.
        needs_gpu: True if it runs on CUDA tensors only.
        dot_error: error of an index score relative to its terms, if its accumulator is narrower
            than float32.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    version: str = ""
    translates: tuple[str, ...] = ()
    excused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_gpu: bool = False
    dot_error: Bound | None = None

    def why_not(self, case: Case) -> str:
        """Return the reason why a case does not apply to the library; "" if it does."""
        if case.case_id in self.excused:
            return self.excused[case.case_id]
        if not case.operations:
            return f"not about what {self.name} has"
        if not {*case.operations, *case.also} & set(self.functions):
            return f"{self.name} has no {', '.join(case.operations)}"
        return ""


def load_adapter(against: str) -> Adapter:
    """Find a library's adapter by name.

    Args:
        against: "flash_mla", "deep_gemm", "cudnn_frontend", "vllm_xpu", "compat" (this package's
            own stand-ins for the first two), or "module:attribute", where the attribute is an
            ``Adapter``, a mapping from operations to callables, or a callable that stands in for
            the operation of its own name ("module:attribute=operation" for another's). Those take
            the operation's arguments. Modules of the working directory are found as well.

    Raises:
        BackendUnavailable: the library is not installed, or cannot be loaded here.
        ValueError: the name is unknown.
    """
    if against in _KNOWN:
        adapter: Adapter = importlib.import_module(f"{__name__}.{against}").adapter()
        return adapter
    if ":" not in against:
        known = ", ".join(_KNOWN)
        raise ValueError(f"--against {against}: expected one of {known}, or module:function")
    module, _, rest = against.partition(":")
    attribute, _, operation = rest.partition("=")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"--against {against}: {error}") from error
    if isinstance(found, Adapter):
        return found
    functions = found if isinstance(found, Mapping) else {operation or found.__name__: found}
    from anymla.testing.conformance.ops import all_operations

    unknown = sorted(set(functions) - set(all_operations()))
    if unknown:
        raise ValueError(
            f"--against {against}: {', '.join(unknown)} is no operation of this package; name one "
            "with module:function=operation"
        )
    return Adapter(against, functions)


def require_module(name: str, library: str) -> Any:
    """Import a library's module.

    Raises:
        BackendUnavailable: the module is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library's import may fail in any way
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BackendUnavailable(f"{library} cannot be imported here: {first}") from error
