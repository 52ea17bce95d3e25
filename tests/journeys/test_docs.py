"""Run every code block of the documentation: the Python of a page as one script, its commands one by one.

They run in the process of the tests, which is fast; tests/journeys/test_demo.py and tests/cli start processes. The
images, files and pretrained checkpoints that the pages name are prepared: see `reader_folder` and `hub`.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from benchmarks.peers import randomize, repair_torchvision
from tests.cli.typed import typed
from tests.data.images import class_folders, photo
from tests.loopback_hub import Repositories, read_files, serve_hub

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# These install something, build the site or run these very tests; others have tests of their own.
NOT_RUN_HERE = (
    "make demo",  # tests/journeys/test_demo.py runs it with fewer steps
    "make test",
    "make soak",
    "make check",
    "make format",
    "make docs",  # tests/journeys/test_site.py builds the site
    "python3 -m venv",
    ".venv/bin/pip install",
    "pip install",
)
ELSEWHERE = {"README.md": ("vitral export vit-cifar10 --to onnx",)}  # docs/how-to/export.md has the same command
SIZES: dict[str, Any] = dict(width=48, depth=3, heads=3, mlp_width=96, image_size=56)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code of a page. Ten minutes become one second, which is enough for the small networks here."""
    text = re.sub(r"(minutes[ =])10\b", r"\g<1>0.02", page.read_text(encoding="utf-8"))
    return [code for language, code in BLOCK.findall(text) if language in languages]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- what a reader has ----


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages name: photos, a shallow shipped model, a checkpoint of Google."""
    folder = tmp_path_factory.mktemp("reader")
    class_folders(folder / "photos", {"cats": 14, "dogs": 14}, size=(56, 56))
    for number, file in enumerate(sorted((folder / "photos").rglob("*.png"))):  # two photos of each cat and dog
        file.rename(file.with_name(f"IMG{number // 2:02d}_{number % 2 + 1}.png"))
    photo().save(folder / "photo.jpg")
    shipped = vitral.load("vit-cifar10")
    assert isinstance(shipped.model, vitral.ViT)
    model = vitral.ViT(replace(shipped.model.config, depth=2)).to(torch.bfloat16)
    model.load_state_dict({name: shipped.model.state_dict()[name] for name in model.state_dict()})
    vitral.save(replace(shipped, model=model), folder / "shallow.safetensors")
    (folder / "shallow.safetensors").rename(folder / "vit-cifar10")  # a local file takes precedence
    vitral.save(randomize(vitral.create("vit-b16", **SIZES, patch_size=8)), folder / "ViT-B_16.npz", dialect="google")
    return folder


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    """Return small networks in the layouts of the repositories that the pages name."""
    dinov2 = vitral.create("vit-s14", **SIZES, num_classes=0, layer_scale=1.0, activation="gelu")
    google = vitral.create("vit-b16", **SIZES, patch_size=8, activation="gelu")
    networks = {"facebook/dinov2-small": dinov2, "google/vit-base-patch16-224": google}
    repositories = {}
    for repository, network in networks.items():
        folder = tmp_path_factory.mktemp("repository") / "files"
        vitral.save(randomize(network), folder, dialect="huggingface")
        repositories[repository] = read_files(folder)
    return repositories


@pytest.fixture(scope="module")
def hub(repositories: Repositories, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let huggingface_hub talk to a hub on this machine, with a cache of its own."""
    from huggingface_hub import constants

    with serve_hub(repositories) as (endpoint, _), pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", endpoint)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Vision Transformers two blocks: more blocks take longer and prove nothing else about a page."""
    create = vitral.create

    def create_shallow(name: str, **fields: Any) -> vitral.ViT | vitral.BiT:
        return create(name, **(fields if name.startswith("bit") else {"depth": 2, **fields}))

    monkeypatch.setattr(vitral, "create", create_shallow)


@pytest.fixture
def short_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plots of a report, which take half of the time of a short run; one page draws them."""
    if "first-model" not in request.node.name:
        monkeypatch.setattr("vitral.api.write_report", lambda folder: vitral.Run(folder).report.write_text("<html>"))


# ---- blocks ----


@pytest.mark.usefixtures("few_digits", "shallow", "short_report", "hub")
@pytest.mark.filterwarnings("ignore:.*computes with:UserWarning")  # a dialect with other constants, as documented
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "sh")], ids=name)
def test_blocks(page: Path, reader_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of a page, then its commands, in one folder."""
    if page.parent.name == "coming-from":
        repair_torchvision()
    folder = tmp_path / "reader"
    shutil.copytree(reader_folder, folder)
    monkeypatch.chdir(folder)
    script = folder / "page.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "vitral":
            if "--processes" in words:  # they start from the command line, and see no fixture
                words += ["--steps", "2", "--image-size", "32"] if words[1] == "train" else []
                monkeypatch.setattr("sys.argv", words)
            done = typed(*words[1:])
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            run(words, ROOT if words[0] == "make" else folder)


def commands(page: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for code in blocks(page, "sh") for line in code.splitlines()]
    skipped = ("#", *NOT_RUN_HERE, *ELSEWHERE.get(page.name, ()))
    return [line for line in lines if line and not line.startswith(skipped)]


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        languages = {language for language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        directives = {language for language in languages if language.startswith("{")}
        assert languages - directives <= {"python", "sh", "text"}, f"{page}: {languages}"


def test_links_to_files_exist() -> None:
    """Links must resolve in a checkout, too; tests/journeys/test_site.py checks those of the site."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{name(page)} -> {target}"


# ---- examples and generated pages ----

EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "demo"]  # it has test_demo.py


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_page_of_speed_has_the_newest_benchmark_results() -> None:
    from benchmarks.table import PAGE, renew_page

    text = PAGE.read_text(encoding="utf-8")
    assert text == renew_page(text), "run: python -m benchmarks.table"


def test_generated_pages_match_the_code() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for file, make_page in pages.items():
        text = (ROOT / "docs" / "reference" / file).read_text(encoding="utf-8")
        assert text == make_page(), f"{file}: run: python docs/generate.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
