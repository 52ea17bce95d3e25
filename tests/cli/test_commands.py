"""The commands as a person types them, in a process of their own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.typed import typed
from vitral.model.sizes import NAMES


def vitral(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vitral", *words], capture_output=True, text=True)


def test_models_as_a_table() -> None:
    done = vitral("models")
    assert done.returncode == 0
    assert all(name in done.stdout for name in NAMES)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("vit-b16 ")]
    assert "86.6 M" in row
    assert "35.1 G" in row


def test_an_interruption_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitral.cli.doctor.examine", interrupt)
    done = typed("doctor")
    assert (done.returncode, done.stderr) == (130, "vitral: interrupted\n")


def test_models_as_json() -> None:
    rows = json.loads(vitral("models", "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(NAMES)
    (row,) = [row for row in rows if row["name"] == "vit-b16"]
    assert row["parameters"] == 86_567_656
    assert row["forward_flops"] == 35_127_656_448
    assert row["image_size"] == [224, 224]
    assert row["training_bytes"] > row["inference_bytes"] > 4 * row["parameters"]


def test_models_quietly() -> None:
    assert vitral("models", "--format", "quiet").stdout.split() == list(NAMES)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["ViT-B/16"], ["vit-b16"]),
        (["hybrid", "l32"], ["r50-vit-l32"]),
        (["small", "nano"], ["vit-nano4", "vit-nano7", "vit-nano8"]),
    ],
)
def test_models_by_words(words: list[str], names: list[str]) -> None:
    assert vitral("models", *words, "--format", "quiet").stdout.split() == names


def test_models_at_another_size() -> None:
    (row,) = json.loads(vitral("models", "vit-b16", "--image-size", "384", "--format", "json").stdout)
    assert row["tokens"] == 577
    assert row["forward_flops"] == pytest.approx(111e9, rel=0.01)


def test_models_whose_patch_does_not_divide_a_size_are_left_out_and_counted() -> None:
    done = vitral("models", "--image-size", "384x256")
    assert done.returncode == 0
    assert "vit-b16 " in done.stdout
    assert "vit-h14" not in done.stdout
    assert "models are left out: their patch does not divide this size." in done.stdout.replace("\n", " ")


def test_models_at_a_size_that_does_not_fit() -> None:
    done = vitral("models", "vit-b16", "--image-size", "225")
    assert done.returncode == 2
    assert "Resize, crop or pad the image to 224 x 224" in done.stderr


def test_doctor() -> None:
    done = vitral("doctor")
    assert done.returncode == 0
    assert "torch" in done.stdout
    findings = json.loads(vitral("doctor", "--format", "json").stdout)
    assert findings["device"]["value"] in ("cpu", "cuda", "mps")
    assert findings["device"]["reason"]
    assert findings["packages"]["torch"]
    assert findings["problems"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model"], 'Did you mean "models"?'),
        (["models", "--fromat", "json"], "Did you mean --format?"),
        (["models", "--format", "jsn"], "json"),
        (["models", "vit-b1x"], "No model matches 'vit-b1x'. Did you mean 'vit-b16'?"),
        (["models", "--image-size", "many"], "--image-size 'many' must be a whole number of pixels below a million"),
        (["models", "--image-size=-5"], "--image-size '-5' must be"),
        (["models", "vit-b", "vit-s"], "No model has all of 'vit-b' 'vit-s'"),
        (["doctor", "extra"], "These words are not expected: extra. See `vitral doctor --help`."),
        (["models", "--image-size", "1" * 5000], "must be a whole number of pixels"),
    ],
)
def test_what_is_mistyped_gets_one_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    done = vitral(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("words", ["--help", "models", "models --format json", "doctor"])
def test_a_closed_pipe_is_no_error(words: str) -> None:
    command = f"set -o pipefail; '{sys.executable}' -m vitral {words} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("words", ["models", "models --format json", "doctor"])
def test_a_full_disk_gets_one_sentence(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "vitral", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "vitral: The result could not be written: No space left on device."


def test_a_narrow_terminal_loses_no_numbers() -> None:
    for columns in ("0", "20"):
        environment = {**os.environ, "COLUMNS": columns}
        command = [sys.executable, "-m", "vitral", "models", "b16"]
        assert "35.1 G" in subprocess.run(command, capture_output=True, text=True, env=environment).stdout


def test_a_traceback_only_with_debug() -> None:
    assert "Traceback" not in vitral("models", "nonsense").stderr
    assert "Traceback" in vitral("models", "nonsense", "--debug").stderr


def test_help_and_version() -> None:
    assert "models" in vitral("--help").stdout
    assert "doctor" in vitral("--help").stdout
    assert vitral("--version").stdout.strip() == __import__("vitral").__version__


def test_help_is_quick_and_knows_no_torch() -> None:
    """Under 0.5 s; the best of several, since other tests share the machine."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert vitral("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    "statement",
    [
        "import vitral",
        "import vitral; vitral.ViTConfig, vitral.VitralError",
        "from vitral.cli.main import main; main(['--help'])",
        "from vitral.cli.main import main; main(['models'])",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(statement: str) -> None:
    script = f"{statement}\nimport sys; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
