"""The shape of the package: the length of import chains, functions and files; and the targets that CI calls."""

import ast
import re
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_CHAIN, MAX_FUNCTION_LINES, MAX_FILE_LINES = 22, 55, 400  # the tree has 21 layers


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
                documented = ast.get_docstring(node) is not None and len(node.body) > 1
                lines = (node.end_lineno or 0) - node.body[documented].lineno + 1  # without signature and docstring
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_ci_calls_targets_that_exist_on_every_supported_python() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    called = set(re.findall(r"run: make ([a-z]+)", workflow))
    assert {"check", "test", "demo", "docs"} <= called <= set(targets)
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"python: {classifiers}".replace("'", '"') in workflow
    assert all(f"{system}-latest" in workflow for system in ("ubuntu", "macos", "windows"))
