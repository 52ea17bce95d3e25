"""Build the wheel, install it into an empty environment, and use it."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from PIL import Image

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_works_with_the_dependencies_that_it_declares(wheel: Path, tmp_path: Path) -> None:
    """The environment links the dependencies of the wheel and theirs, and nothing else of this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty", cwd=tmp_path)
    python = scripts_of(tmp_path / "empty") / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    variables = {"base": str(tmp_path / "empty"), "platbase": str(tmp_path / "empty")}
    packages = Path(sysconfig.get_path("purelib", vars=variables))
    (metadata,) = packages.glob("vitral-*.dist-info")
    for dependency in dependencies_of(PathDistribution(metadata), seen=set()):
        link_packages(dependency, packages)
    assert (packages / "torch").exists()
    assert not (packages / "timm").exists()
    assert_works(tmp_path / "empty", tmp_path)


@pytest.mark.soak
def test_the_wheel_works_after_pip_installed_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = scripts_of(tmp_path / "empty") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert_works(tmp_path / "empty", tmp_path)


def scripts_of(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin")


def dependencies_of(package: Distribution, seen: set[str]) -> Iterator[Distribution]:
    """Yield the installed dependencies of a package, and theirs."""
    for requirement in map(Requirement, package.requires or ()):
        name = requirement.name.lower()
        if name not in seen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            seen.add(name)
            dependency = distribution(name)
            assert requirement.specifier.contains(dependency.version, prereleases=True), requirement
            yield dependency
            yield from dependencies_of(dependency, seen)


def link_packages(package: Distribution, target: Path) -> None:
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (target / top).exists():
            (target / top).symlink_to(str(package.locate_file(top)))


def assert_works(environment: Path, folder: Path) -> None:
    """Assert that the commands and the package work in this environment."""
    scripts = scripts_of(environment)
    assert "vit-b16" in run(scripts / "vitral", "models", cwd=folder)
    assert "No problems found." in run(scripts / "vitral", "doctor", cwd=folder)
    Image.new("RGB", (640, 480), "skyblue").save(folder / "photo.jpg")
    label = run(scripts / "vitral", "predict", "vit-cifar10", "photo.jpg", "--format", "quiet", cwd=folder)
    assert label.strip() in {"airplane", "bird", "ship"}  # the image is one blue
    script = "import torch, vitral; print(vitral.create('vit-pico7')(torch.zeros(1, 3, 28, 28)).shape, vitral.__file__)"
    out = run(scripts / "python", "-W", "error", "-c", script, cwd=folder)
    assert "torch.Size([1, 1000])" in out
    assert str(ROOT / "src") not in out
    assert (Path(out.split()[-1]).parent / "py.typed").exists()
