"""A kernel has the same key in Triton's cache in every process, whatever was launched before."""

import collections
import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from anymla.ops.device import has_triton
from anymla.ops.norm_rope import rms_norm
from anymla.ops.registry import LazyFunction

if not has_triton():
    pytest.skip("triton is an extra", allow_module_level=True)

from lab.kernel_files import kernel_modules


def print_keys(reverse: bool) -> None:
    """Print key and globals of all functions of all kernel files.

    Keys are computed after one backend was loaded, in the order of names or in the opposite one.
    """
    from triton.language.core import constexpr
    from triton.runtime.jit import JITCallable

    run = rms_norm.backends["triton"].run
    assert isinstance(run, LazyFunction)
    run.load()
    functions = {}
    for modules in kernel_modules().values():
        for module in map(importlib.import_module, modules):
            for name, value in vars(module).items():
                if isinstance(value, JITCallable) and value.fn.__module__ == module.__name__:
                    functions[f"{module.__name__}.{name}"] = value
    found = {}
    for name in sorted(functions, reverse=reverse):
        key = functions[name].cache_key
        values = collections.defaultdict(set)
        for (each, _), (value, _) in functions[name].used_global_vals.items():
            if isinstance(value, constexpr):
                values[each].add(str(value))
        found[name] = key, {each: sorted(values[each]) for each in sorted(values)}
    print(json.dumps(found))


def _keys_of_a_process(reverse: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    code = f"import tests.ops.test_triton_keys as test; test.print_keys(reverse={reverse})"
    settings = {"TRITON_INTERPRET": "0", "PYTHONHASHSEED": str(1 + reverse)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, dict[str, Any]]] = json.loads(done.stdout)
    assert len(found) > 500
    return found


def test_keys_do_not_depend_on_what_was_launched_before():
    found = _keys_of_a_process(reverse=False)
    assert found == _keys_of_a_process(reverse=True)
    # Triton sorts globals of one name by the addresses of their modules, which processes differ in.
    for name, (_, constants) in found.items():
        assert {each: all_ for each, all_ in constants.items() if len(all_) > 1} == {}, name
