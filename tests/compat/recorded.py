"""Signatures of other libraries' functions, read from their sources without importing them.

    python tests/compat/recorded.py flash_mla=FOLDER=VERSION deep_gemm=FOLDER=VERSION

prints what ``src/anymla/compat/signatures.json`` holds: the parameters of every public function, or
null for a function of C++.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

PACKAGES = {"flash_mla": "sgl-flash-mla", "deep_gemm": "sgl-deep-gemm"}
# Public modules of each package, and their files.
MODULES = {
    "flash_mla": {
        "flash_mla": "__init__",
        "flash_mla.fused_norm_rope_attn_rope_cast": "fused_norm_rope_attn_rope_cast",
    },
    "deep_gemm": {"deep_gemm": "__init__"},
}


def signature(function: ast.FunctionDef) -> str:
    """Parameters as they are written, without types."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(function.args)


def functions(path: Path) -> dict[str, str | None]:
    """Public functions of a file by name: its own, second names of them, and imported ones."""
    found: dict[str, str | None] = {}

    def imported(statement: ast.ImportFrom) -> None:
        own = statement.level or (statement.module or "").startswith(f"{path.parent.name}.")
        file = (statement.module or "").split(".")[-1]
        sources = (path.parent / f"{file}.py", path.parent / file / "__init__.py")
        source = next((each for each in sources if own and file and each.is_file()), None)
        theirs = functions(source) if source else {}
        for each in statement.names:
            if each.name in theirs:
                found[each.asname or each.name] = theirs[each.name]

    def visit(statements: list[ast.stmt]) -> None:
        for each in statements:
            if isinstance(each, ast.FunctionDef):
                found[each.name] = signature(each)
            elif isinstance(each, ast.Try):
                visit(each.body)
            elif isinstance(each, ast.ImportFrom):
                imported(each)
            elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                name, value = each.targets[0].id, each.value
                if isinstance(value, ast.Name) and value.id in found:
                    found[name] = found[value.id]
                elif isinstance(value, ast.Attribute) and ast.unparse(value.value) == "_C":
                    found[name] = None

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return {name: given for name, given in sorted(found.items()) if name[0] != "_"}


def recorded(package: str, folder: Path) -> dict[str, dict[str, str | None]]:
    """Functions of each module of a package whose files are in a folder."""
    found = {module: functions(folder / f"{file}.py") for module, file in MODULES[package].items()}
    for module in found.values():  # imported for their own use
        for name in ("get_ops", "find_cuda_home"):
            module.pop(name, None)
    return found


def main(given: list[str]) -> None:
    made = {}
    for each in given:
        package, folder, version = each.split("=")
        modules = recorded(package, Path(folder))
        made[package] = {"package": PACKAGES[package], "version": version, "modules": modules}
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
