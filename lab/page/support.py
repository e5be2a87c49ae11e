"""The support table of docs/portability.md, from recorded evidence and nothing else."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from anymla.ops.device import TARGETS
from lab.kernel_files import SHARED
from lab.page.rows import Row
from lab.page.table import Table, markdown

# Family of a row for all that is marked for a GPU.
WHOLE = "all"
# End of the name of a device that is pretended by an interpreter of its compiled code.
INTERPRETED = ", interpreted on a CPU"


def support_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the Markdown table of the targets for which something was built."""
    built: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
    for row in rows:
        if "module" in row:
            built[_family(row["module"]), row["target"]].append(row["ok"])
    ran = {(row["family"], row["target"]): row for row in rows if "family" in row}
    families = sorted({family for family, _ in built})
    recorded = {target for _, target in built}
    targets = [name for name in TARGETS if name in recorded]
    body = [
        [
            family,
            *(
                _cell(built[family, name], ran.get((family, name), ran.get((WHOLE, name))))
                for name in targets
            ),
        ]
        for family in families
    ]
    return markdown(Table(["operations", *targets], body, source=""))


def _family(module: str) -> str:
    name, _, file = module.removeprefix("anymla.ops.").partition(".")
    return name if file else SHARED


def _cell(builds: list[bool], ran: Row | None) -> str:
    if not builds:
        return "-"
    count = f"built {len(builds)}" if all(builds) else f"built {sum(builds)} of {len(builds)}"
    if ran is None or not ran["passed"]:
        return count
    # Devices that stand in for another target are named "NVIDIA H200 as sm_80", and those that an
    # interpreter of its code pretends "gfx942, interpreted on a CPU".
    if ran["device"].endswith(INTERPRETED):
        how = "executed (interpreter)"
    else:
        how = "executed" if " as " in ran["device"] else "run"
    told = f"{how}, {ran['failed']} of {ran['passed'] + ran['failed']} failed"
    return f"{told if ran['failed'] else f'**{how}**'}, {count}"
