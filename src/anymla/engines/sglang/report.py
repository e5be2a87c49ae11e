"""The decision which of SGLang's parts the plugin replaces on a machine, and the reasons."""

from __future__ import annotations

import dataclasses
import os

import torch

from anymla.engines.seams import missing, source_of
from anymla.engines.sglang.pinned import HOOKS, SEAMS, VERSIONS, installed_version

VARIABLE = "ANYMLA_SGLANG"
PARTS = ("attention", "indexer")
ATTENTION, INDEXER = PARTS
AUDIT = "audit"
MODES = ("auto", "force", "off")

# Major compute capabilities that SGLang's own kernels have: FlashMLA of ``sgl-flash-mla`` and
# DeepGEMM; on sm_120 SGLang has kernels of its own for both parts.
_ITS_OWN = (9, 10, 12)
_LIBRARIES = {ATTENTION: "FlashMLA", INDEXER: "DeepGEMM"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of SGLang's DeepSeek-V4, the decision to replace it, and the reason."""

    name: str
    replaced: bool
    why: str


def chosen() -> frozenset[str]:
    """Return the words of ANYMLA_SGLANG: one of MODES, or names of PARTS; "audit" with either.

    Raises:
        ValueError: the environment variable holds another value.
    """
    value = os.environ.get(VARIABLE, "auto")
    words = frozenset(word.strip() for word in value.split(","))
    others = words - {AUDIT}
    if not (others <= set(PARTS) or (len(others) == 1 and others <= set(MODES))):
        known = (
            f"one of {', '.join(MODES)}, or parts of {', '.join(PARTS)}, with or without {AUDIT}"
        )
        raise ValueError(f"{VARIABLE} must be {known}, got {value!r}")
    return words


def this_machine() -> str:
    """Return the name of the machine: "sm_90", "rocm", "xpu", "cpu"."""
    if torch.version.hip is not None:
        return "rocm"
    if torch.cuda.is_available():
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return "xpu" if torch.xpu.is_available() else "cpu"


def plan(machine: str, words: frozenset[str]) -> list[Part]:
    """Decide each part of an admitted SGLang.

    ``auto`` replaces what SGLang has no kernel for on the machine, and nothing for speed, because
    attention was measured within SGLang's backend and not in a whole server.

    Args:
        machine: result of ``this_machine``.
        words: result of ``chosen``.
    """
    return [_decided(name, machine, words) for name in PARTS]


def _decided(name: str, machine: str, words: frozenset[str]) -> Part:
    if "off" in words:
        return Part(name, False, f"{VARIABLE}=off")
    if "force" in words:
        return Part(name, True, f"{VARIABLE}=force")
    if name in words:
        return Part(name, True, f"{VARIABLE} asks for it")
    if "auto" not in words:
        return Part(name, False, f"{VARIABLE} does not ask for it")
    if not machine.startswith("sm_"):
        return Part(name, False, f"SGLang has its own on {machine}; {VARIABLE}={name} replaces it")
    if int(machine[3:-1]) in _ITS_OWN:
        return Part(name, False, f"SGLang's own runs on {machine}; {VARIABLE}={name} replaces it")
    return Part(name, True, f"SGLang's own needs {_LIBRARIES[name]}, which has no {machine}")


def refusal(version: str | None) -> str | None:
    """Return the reason why nothing may be replaced in this SGLang; None if it is admitted."""
    if version in VERSIONS:
        return None
    return f"SGLang {version} is not among those that the plugin admits ({', '.join(VERSIONS)})"


def refusal_by_source(names: list[str]) -> str | None:
    """Return why parts, or the audit, cannot hook into the installed SGLang; None if they can.

    Args:
        names: names in PARTS, and AUDIT.
    """
    if not names:
        return None
    lacking = missing(source_of("sglang"), [HOOKS, *(s for name in names for s in SEAMS[name])])
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"in SGLang {installed_version()} {lacking[0]}{more}" if lacking else None


def plugin_view() -> list[dict[str, str]]:
    """List the parts that ``sglang serve`` would replace here, without starting a server.

    Returns:
        Rows of short texts under "part", "action" ("replaced" or "kept"; for the part "SGLang" its
        version or "not installed"; for the audit "on" or "off") and "why".

    Raises:
        ValueError: the environment variable ANYMLA_SGLANG holds an unknown value.
    """
    words, version = chosen(), installed_version()
    if version is None:
        return [{"part": "SGLang", "action": "not installed", "why": "pip install sglang"}]
    if refused := refusal(version):
        return [{"part": "SGLang", "action": version, "why": refused}]
    rows = [{"part": "SGLang", "action": version, "why": VERSIONS[version]}]
    for part in plan(this_machine(), words):
        lacking = refusal_by_source([part.name]) if part.replaced else None
        action = "replaced" if part.replaced and not lacking else "kept"
        rows.append({"part": part.name, "action": action, "why": lacking or part.why})
    audited = AUDIT in words
    lacking = refusal_by_source([AUDIT]) if audited else None
    why = lacking or f"{VARIABLE} {'asks' if audited else 'does not ask'} for it"
    rows.append({"part": AUDIT, "action": "on" if audited and not lacking else "off", "why": why})
    return rows
