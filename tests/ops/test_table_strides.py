"""Kernels are compiled once for page tables of every width."""

import ast
import pathlib

import anymla.ops

OPS = pathlib.Path(anymla.ops.__file__).parent
# Tables of a model's angles, whose width never changes.
OF_ANGLES = {"query_kernel", "rope_kernel", "qnorm_rope_kv_insert_kernel"}


def kernels():
    """Each kernel with the row strides of page tables that it takes, and what it is not
    specialised on."""
    for path in sorted(OPS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            names = {each.arg for each in node.args.args}
            strides = names & {"table_stride", "table_row_stride"}
            if path.parent.name == "step_indices":
                strides |= names & {"row_stride"}
            if strides:
                yield node.name, strides, general(node)


def general(node: ast.FunctionDef) -> set[str]:
    """What ``do_not_specialize`` lists."""
    for decorator in node.decorator_list:
        for keyword in getattr(decorator, "keywords", ()):
            if keyword.arg == "do_not_specialize":
                return set(ast.literal_eval(keyword.value))
    return set()


def test_no_kernel_is_specialised_on_the_width_of_a_page_table() -> None:
    """Engines give tables of any width, of which some are multiples of 16."""
    found = {name: (strides, names) for name, strides, names in kernels() if name not in OF_ANGLES}
    assert {"gather_sequences_kernel", "row_topk_kernel", "compress_kernel"} <= found.keys()
    assert [name for name, (strides, names) in found.items() if not strides <= names] == []
