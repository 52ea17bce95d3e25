"""The shape of the package: the length of import chains, functions and files."""

import ast
from functools import cache
from pathlib import Path

import grimp

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
MAX_CHAIN, MAX_FUNCTION_LINES, MAX_FILE_LINES = 22, 60, 400  # the tree has 21 layers


def test_import_chains_are_short() -> None:
    """Function-level imports count; imports for type checkers do not."""
    graph = grimp.build_graph("vitral", exclude_type_checking_imports=True)

    @cache
    def longest_chain(module: str) -> tuple[str, ...]:
        chains = (longest_chain(imported) for imported in graph.find_modules_directly_imported_by(module))
        return (module, *max(chains, key=len, default=()))

    chain = max(map(longest_chain, graph.modules), key=len)
    assert len(chain) <= MAX_CHAIN, " -> ".join(chain)


def test_files_and_functions_are_short() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_FILE_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"
