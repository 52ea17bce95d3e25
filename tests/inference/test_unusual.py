"""How unusual images are to a run, which stores the statistics of its training features."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral
from tests.cli.typed import typed
from vitral.inference.novelty import fit_novelty


@pytest.fixture(scope="module")
def plain(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the run without statistics, as earlier versions wrote it."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    shutil.copytree(run, folder)
    vitral.Run(folder).novelty.unlink()
    return folder


@pytest.fixture
def images(photos: Path, tmp_path: Path) -> list[str]:
    """Return an ordinary image, white noise and a broken file."""
    noise, broken = tmp_path / "noise.npy", tmp_path / "broken.png"
    np.save(noise, np.tile(np.array([0, 255], np.uint8), (20, 8))[..., None].repeat(3, 2))
    broken.write_bytes(b"no image")
    return [str(photos / "test/red/000.png"), str(noise), str(broken)]


def test_labels_and_probabilities_are_those_without_statistics(run: Path, plain: Path, photos: Path) -> None:
    without, unusual = (vitral.Predictor(folder)(photos / "test") for folder in (plain, run))
    for first, second in zip(without, unusual, strict=True):
        assert first.unusual is None
        assert second.unusual is not None
        assert 0 <= second.unusual <= 1
        assert first.label == second.label
        assert np.array_equal(first.probabilities, second.probabilities)  # one forward pass, the same numbers


def test_ordinary_images_are_kept_and_others_rejected(run: Path, photos: Path, images: list[str]) -> None:
    rows = typed("predict", str(run), str(photos / "test"), "--format", "json", "--reject", "0.999").stdout
    labels = [json.loads(line)["label"] for line in rows.splitlines()]
    assert sum(label is not None for label in labels) >= 19  # of 21
    done = typed("predict", str(run), *images, "--format", "json", "--reject", "0.95")
    assert done.returncode == 3
    ordinary, noise, broken = map(json.loads, done.stdout.splitlines())
    assert ordinary["label"] == "red"
    assert ordinary["unusual"] < 0.95
    assert (noise["label"], noise["probability"], noise["top"]) == (None, None, [])
    assert noise["unusual"] > 0.95
    assert "unusual" not in broken


def test_rows_of_every_format(run: Path, images: list[str]) -> None:
    csv_rows = typed("predict", str(run), *images, "--format", "csv", "--top", "1", "--reject", "0.95").stdout
    header, ordinary, noise, broken = (line.split(",") for line in csv_rows.splitlines())
    assert header == ["file", "label", "probability", "unusual", "error"]
    assert ordinary[1] == "red"
    assert 0 <= float(ordinary[3]) < 0.95
    assert noise[1:3] == ["", ""]
    assert float(noise[3]) > 0.95
    assert broken[3] == ""
    assert "noise.npy  unusual (" in typed("predict", str(run), *images, "--reject", "0.95").stdout
    quiet = typed("predict", str(run), *images, "--format", "quiet", "--reject", "0.95").stdout
    assert quiet == "red\n\n\n"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_file_with_rejected_rows_resumes(run: Path, images: list[str], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"labels.{suffix}"
    words = ("predict", str(run), *images, *images, "--reject", "0.95", "--out", str(out))
    assert typed(*words).returncode == 3
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-2]))
    done = typed(*words, "--resume")
    assert (done.returncode, out.read_bytes()) == (3, whole), done.stderr
    assert "6 rows, 2 with an error" in done.stderr
    lowest = typed(*words[:-3], "0.000001", *words[-2:], "--resume")
    assert lowest.returncode == 2
    assert "the same --reject" in lowest.stderr


def test_reject_needs_statistics(plain: Path, images: list[str]) -> None:
    done = typed("predict", str(plain), images[0], "--reject", "0.95")
    assert done.returncode == 2
    assert "vitral train" in done.stderr
    assert typed("predict", str(plain), images[0], "--reject", "1.5").returncode == 2


def test_statistics_of_another_model_are_refused(run: Path, images: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    fit_novelty(torch.randn(20, 7), torch.arange(20) % 2).save(vitral.Run(folder).novelty)
    done = typed("predict", str(folder), images[0])
    assert done.returncode == 2
    assert "7 features; expected 48" in done.stderr
