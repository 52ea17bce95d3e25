"""Run every code block of the documentation: the Python of a page as one script, its commands one by one.

They run in the process of the tests, which is fast; tests/journeys/test_demo.py and tests/cli start processes.
"""

import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from tests.cli.typed import typed

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# These install something, run these very tests, or need the network.
NOT_RUN_HERE = (
    "make demo",  # tests/journeys/test_demo.py runs it with fewer steps
    "make test",
    "make soak",
    "make check",
    "make format",
    "python3 -m venv",
    ".venv/bin/pip install",
    "pip install",
    "vitral describe hf:",
    "vitral train photos/ --from dinov2-s14",  # downloads a checkpoint
    "vitral convert ViT-B_16.npz",  # a file of hundreds of megabytes
)
ELSEWHERE = {"README.md": ("vitral export vit-cifar10 --to onnx",)}  # docs/export.md has the same command


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def shallow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Vision Transformers two blocks: more blocks take longer and prove nothing else about a page."""
    shipped, create = vitral.load("vit-cifar10"), vitral.create
    assert isinstance(shipped.model, vitral.ViT)
    model = vitral.ViT(replace(shipped.model.config, depth=2)).to(torch.bfloat16)
    model.load_state_dict({name: shipped.model.state_dict()[name] for name in model.state_dict()})
    vitral.save(replace(shipped, model=model), tmp_path / "shallow.safetensors")
    (tmp_path / "shallow.safetensors").rename(tmp_path / "vit-cifar10")  # a local file takes precedence

    def create_shallow(name: str, **fields: Any) -> vitral.ViT | vitral.BiT:
        return create(name, **(fields if name.startswith("bit") else {"depth": 2, **fields}))

    monkeypatch.setattr(vitral, "create", create_shallow)


@pytest.mark.usefixtures("few_digits", "shallow")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "sh")], ids=name)
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of a page, then its commands, in one folder."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "vitral":
            done = typed(*words[1:])
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            run(words, ROOT if words[0] == "make" else tmp_path)


def commands(page: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for code in blocks(page, "sh") for line in code.splitlines()]
    runnable = [line for line in lines if " photos" not in line]  # the reader's images
    return [
        line for line in runnable if line and not line.startswith(("#", *NOT_RUN_HERE, *ELSEWHERE.get(page.name, ())))
    ]


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        languages = {language for language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert languages <= {"python", "sh"}, f"{page}: {languages}"


def test_links_to_files_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{name(page)} -> {target}"


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "demo"]  # it has test_demo.py


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_the_newest_benchmark_results() -> None:
    from benchmarks.table import write_readme

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == write_readme(readme), "run: python -m benchmarks.table"


def test_the_page_of_fields_matches_the_source() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "fields.py"))["make_page"]()
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == page, "run: python docs/fields.py"
