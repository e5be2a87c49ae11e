"""Markdown tables of Intel's machine code for the kernels, from recorded builds alone."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from anymla.ops.device import TARGETS
from lab.page.rows import Row, of_part
from lab.page.table import Table, markdown

PEER_PART = "decode attention built for Intel's GPUs"


def intel_table(rows: Sequence[Row]) -> list[str]:
    """Return Markdown lines: one row for each kernel and one column for each Intel target.

    A cell has the largest values of the kernel's builds: spilled registers, KiB of instructions,
    matrix instructions (DPAS) and KiB of private memory per thread, if there is any; then the
    number of builds. It is "-" if none was recorded.

    Args:
        rows: newest row of each build; rows of other kinds are ignored.
    """
    builds: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if "module" in row and str(row["target"]).startswith("xpu_"):
            family = row["module"].removeprefix("anymla.ops.").split(".")[0]
            builds[f"{family}: {row['label'].split()[0]}", row["target"]].append(row)
    targets = [name for name in TARGETS if any(target == name for _, target in builds)]
    if not targets:
        return []
    body = [
        [kernel, *(_cell(builds[kernel, target]) for target in targets)]
        for kernel in sorted({kernel for kernel, _ in builds})
    ]
    lines = markdown(Table(["kernel", *targets], body, source=""))
    found = [row for each in builds.values() for row in each]
    compilers = {(row["triton"], row["ocloc"]) for row in found if row.get("built")}
    lines += ["", *(f"(triton-xpu {triton}, ocloc {ocloc})" for triton, ocloc in sorted(compilers))]
    return lines


def intel_peer_table(rows: Sequence[Row]) -> list[str]:
    """Return Markdown lines on both libraries' decode attention: one for each target and kernel.

    Args:
        rows: newest row of each kernel; rows of other kinds are ignored.
    """
    found = of_part(rows, PEER_PART)
    if not found:
        return []
    body = []
    for row in sorted(found, key=lambda row: list(TARGETS).index(row["target_name"])):
        each, whole = row["instructions_per_key"], row["library_instructions_per_key"]
        keys = f"{each:,}" if each == whole else f"{each:,} of {whole:,}"
        body.append(
            [
                row["target_name"], f"{row['library']}: {row['kernel']}", f"{row['spills']:,}",
                f"{row['code_bytes'] / 1024:.0f}", str(row["products"]), keys,
                "yes" if row["sink"] else "left out",
            ]
        )  # fmt: skip
    head = ["target", "kernel", "spilled", "KiB", "DPAS", "instructions a key", "sink"]
    made = {(row["triton"], row["ocloc"], row["vllm"]) for row in found}
    words = "(triton-xpu {}, ocloc {}, vLLM {})"
    lines = markdown(Table(head, body, source=""))
    return [*lines, "", *(words.format(*each) for each in sorted(made, key=str))]


def _cell(builds: Sequence[Row]) -> str:
    if not builds:
        return "-"
    made = [row for row in builds if row["built"]]
    if not made:
        return f"not built: 0 of {len(builds)}"
    spills, code, private, products = (
        max(row[name] for row in made)
        for name in ("spills", "code_bytes", "private_bytes", "products")
    )
    words = [f"{spills} spilled" if spills else "no spill", f"{code / 1024:.0f} KiB"]
    words += [f"{products} DPAS"] * bool(products)
    words += [f"{private / 1024:.1f} KiB private"] * bool(private)
    whole = len(made) == len(builds)
    words.append(f"of {len(builds)}" if whole else f"{len(made)} of {len(builds)} built")
    return ", ".join(words)
