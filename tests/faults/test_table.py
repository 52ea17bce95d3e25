"""Record the rows of the reliability table whose proof is elsewhere: in ordinary tests, in a benchmark, in other tools.

Rows of this module and of all other tests together are those of the table.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitral
from benchmarks.loader import make_photos, measure
from benchmarks.reliability import LINES
from tests.cli.typed import typed
from tests.faults.figures import record

TESTS = Path(__file__).parents[1]
ORDINARY = {
    "Files that try to run code": ("no code runs", ["faults/test_evil_files.py"]),
    "Odd datasets: empty class, duplicates, links, Unicode names": (
        "each reported by `vitral data`",
        ["data/test_scan.py", "data/sources/test_folder.py"],
    ),
}
SPEEDUP, LARGE_SPEEDUP = 1.6, 3.0


def test_every_row_is_recorded_by_a_test() -> None:
    sources = [*TESTS.rglob("test_*.py"), TESTS.parent / "benchmarks" / "serve.py"]
    texts = "".join(path.read_text(encoding="utf-8") for path in sources)
    texts = texts.replace("{strategy.upper()}", "DDP") + texts.replace("{strategy.upper()}", "FSDP")
    faults = [fault for rows in LINES.values() for fault, _ in rows]
    assert [fault for fault in faults if f'"{fault}"' not in texts] == []


@pytest.mark.soak
@pytest.mark.parametrize("fault", ORDINARY)
def test_ordinary_tests(fault: str) -> None:
    goal, names = ORDINARY[fault]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / name) for name in names)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed, done.stdout
    record(fault, goal, f"{passed[1]} of {passed[1]} tests passed ({', '.join(names)})")


@pytest.mark.soak
def test_speed_of_decoding_and_cropping() -> None:
    methods, sets = ("pillow", "vitral"), {"A": 120, "B": 24}
    small, large = (measure(name, number, 6, methods)["ratio"]["vitral"] for name, number in sets.items())
    record(
        "Speed of decoding and cropping",
        "at least 1.6 times plain Pillow, 3 times on large JPEGs",
        f"{small:.2f} times; {large:.2f} times on JPEGs of 2000 x 1500",
    )
    assert small >= SPEEDUP
    assert large >= LARGE_SPEEDUP


@pytest.mark.soak
def test_one_image_gives_one_prediction_everywhere(tmp_path: Path) -> None:
    """An ONNX file runs without torch, so that Pillow resizes the images. It rounds twice, torch once."""
    from tests.serving.servers import running

    sizes = {"input": (32, 32), "other": (500, 375)}
    files = {name: write_photos(tmp_path / name, size) for name, size in sizes.items()}
    vitral.export("vit-cifar10", tmp_path / "model.onnx", to="onnx")
    expected = {name: [dict(row.top(5)) for row in vitral.Predictor("vit-cifar10")(files[name])] for name in files}
    every, expected_of_all = [*files["input"], *files["other"]], [*expected["input"], *expected["other"]]
    command = compare(expected_of_all, predict("vit-cifar10", every))
    with running() as server:
        rows = [server.post(Path(file).read_bytes()).json()["predictions"][0]["top"] for file in every]
        served = compare(expected_of_all, rows)
    onnx, resized = (compare(expected[name], predict(str(tmp_path / "model.onnx"), files[name])) for name in files)
    record(
        "One image by command, Python, server and ONNX",
        "the same top 5, probabilities within 1e-5 (ONNX 1e-4)",
        f"the same top 5 of {len(every)} images; command within {command:.0e}, server {served:.0e}, ONNX {onnx:.0e} "
        f"({resized:.0e} if Pillow resizes the image)",
    )
    assert max(command, served) <= 1e-5
    assert onnx <= 1e-4


def write_photos(folder: Path, size: tuple[int, int]) -> list[str]:
    folder.mkdir()
    for number, content in enumerate(make_photos(size, 12)):
        (folder / f"{number:02d}.jpg").write_bytes(content)
    return sorted(map(str, folder.iterdir()))


def predict(model: str, files: list[str]) -> list[list[dict]]:
    rows = typed("predict", model, *files, "--format", "json").stdout.splitlines()
    return [json.loads(row)["top"] for row in rows]


def compare(expected: list[dict[str, float]], rows: list[list[dict]]) -> float:
    """Assert the same labels in the same order, and return the largest difference of a probability."""
    largest = 0.0
    for labels, row in zip(expected, rows, strict=True):
        assert [entry["label"] for entry in row] == list(labels)
        largest = max(largest, *(abs(entry["probability"] - labels[entry["label"]]) for entry in row))
    return largest
