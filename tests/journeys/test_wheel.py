"""Build the wheel, install it into an empty environment, and use it."""

import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    scripts = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin")
    run(
        scripts / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    assert "vit-b16" in run(scripts / "vitral", "models", cwd=tmp_path)
    assert "No problems found." in run(scripts / "vitral", "doctor", cwd=tmp_path)
    Image.new("RGB", (640, 480), "skyblue").save(tmp_path / "photo.jpg")
    label = run(scripts / "vitral", "predict", "vit-cifar10", "photo.jpg", "--format", "quiet", cwd=tmp_path)
    assert label.strip() in {"airplane", "bird", "ship"}  # the image is one blue
    script = "import torch, vitral; print(vitral.create('vit-pico7')(torch.zeros(1, 3, 28, 28)).shape, vitral.__file__)"
    out = run(scripts / "python", "-W", "error", "-c", script, cwd=tmp_path)
    assert "torch.Size([1, 1000])" in out
    assert str(ROOT / "src") not in out
    assert (Path(out.split()[-1]).parent / "py.typed").exists()
