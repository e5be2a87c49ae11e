"""Install the PTX target that CROSSRUN_PTX_TARGET names; Python imports this when it starts.

The folder of this file is put on PYTHONPATH by ``crossrun.ptx``. A ``sitecustomize`` that it hides
runs afterwards.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_target = os.environ.get("CROSSRUN_PTX_TARGET")
if _target:
    # The environment of the child may be another one, without crossrun.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    try:
        from crossrun.ptx import install
    finally:
        sys.path.pop()
    install(_target)

_own = Path(__file__).resolve().parent
_others = [path for path in sys.path if Path(path or ".").resolve() != _own]
_hidden = PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)
