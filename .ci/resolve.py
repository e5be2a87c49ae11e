"""Whether a stranger's pip would find versions that fit: asked of the public index alone.

Resolves, from metadata only, what `make demo`, `make test` and `pip install` of every extra ask
for: no local wheels, no further indexes, no pip or uv configuration. Ends with exit code 1 and the
resolver's reasons if something cannot be installed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = "x86_64-manylinux_2_28"
# Triton has no wheels for these; the package has to install nevertheless.
ELSEWHERE = ("macos", "windows")
# Asks for other versions than the tests do, in an environment of its own.
APART = "vllm"
_OWN = ("UV_", "PIP_")
_KEPT = ("UV_CACHE_DIR", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")


def main() -> int:
    """Resolve everything; print a line for each that fails, and why."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ["", *project["optional-dependencies"]]
    pinned = [extra for extra in extras if extra != APART]
    asked = [(p, LINUX, e, "constraints.txt") for p, e in itertools.product(PYTHONS, pinned)]
    asked += [(p, LINUX, APART, None) for p in PYTHONS]
    asked += [
        (PYTHONS[-1], system, extra, "constraints.txt")
        for system, extra in itertools.product(ELSEWHERE, pinned)
    ]
    # numpy 1.26 has no wheels for Python 3.13.
    asked += [(p, LINUX, "triton", "constraints-lowest.txt") for p in PYTHONS[:2]]
    failed = 0
    with ThreadPoolExecutor(8) as pool:  # most of it waits for the index
        reasons = list(pool.map(lambda each: resolve(*each), asked))
    for (python, system, extra, constraints), reason in zip(asked, reasons, strict=True):
        if reason:
            failed += 1
            what = f"anymla[{extra}]" if extra else "anymla"
            print(f"Python {python}, {system}: {what} with {constraints or 'no constraints'}")
            print("  " + reason.replace("\n", "\n  "), flush=True)
    print(f"{len(asked)} installations asked of the public index, {failed} impossible")
    return bool(failed)


def resolve(python: str, system: str, extra: str, constraints: str | None) -> str:
    """Why it cannot be installed; "" if it can."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    # vLLM asks for packages that a compiler builds where wheels are for a newer libc.
    command += [] if extra == APART else ["--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", system]
    command += ["--extra", extra] if extra else []
    command += ["--constraint", constraints] if constraints else []
    plain = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_OWN)}
    # The oldest macOS that torch has wheels for.
    plain["MACOSX_DEPLOYMENT_TARGET"] = "14.0"
    done = subprocess.run(
        [*command, "pyproject.toml"],
        cwd=ROOT,
        env=plain,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if not done.returncode else done.stderr.strip() or f"exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
