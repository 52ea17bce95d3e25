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
    texts = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
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
    passed = re.search(r"(\d+) passed(?!.*skipped)", done.stdout.splitlines()[-1])
    assert passed, done.stdout
    record(fault, goal, f"{passed[1]} of {passed[1]} tests of {' and '.join(names)}")


@pytest.mark.soak
def test_speed_of_decoding_and_cropping() -> None:
    small, large = (measure(name, number, 6)["ratio"]["vitral"] for name, number in {"A": 120, "B": 24}.items())
    record(
        "Speed of decoding and cropping",
        "at least 1.6 times plain Pillow, 3 times on large JPEGs",
        f"{small:.2f} times; {large:.2f} times on JPEGs of 2000 x 1500",
    )
    assert small >= SPEEDUP
    assert large >= LARGE_SPEEDUP


@pytest.mark.soak
def test_one_image_gives_one_prediction_everywhere(tmp_path: Path) -> None:
    """The photos need cropping and resizing, which the command, the server and the ONNX file do by themselves."""
    from tests.serving.servers import running

    files = [tmp_path / f"{number}.jpg" for number in range(24)]
    for file, content in zip(files, make_photos((500, 375), 12) + make_photos((90, 120), 12), strict=True):
        file.write_bytes(content)
    vitral.export("vit-cifar10", tmp_path / "model.onnx", to="onnx")
    names = [str(file) for file in files]
    expected = [dict(prediction.top(5)) for prediction in vitral.Predictor("vit-cifar10")(names)]
    differences = {}
    for model, title in (("vit-cifar10", "command"), (str(tmp_path / "model.onnx"), "ONNX")):
        rows = typed("predict", model, *names, "--format", "json").stdout.splitlines()
        differences[title] = compare(expected, [json.loads(row)["top"] for row in rows])
    with running() as server:
        rows = [server.post(file.read_bytes()).json()["predictions"][0] for file in files]
        differences["server"] = compare(expected, [row["top"] for row in rows])
    shown = ", ".join(f"{title} {difference:.0e}" for title, difference in differences.items())
    record(
        "One image by command, Python, server and ONNX",
        "the same top 5, probabilities within 1e-5 (ONNX 1e-4)",
        f"the same top 5 of {len(files)} images; largest difference of a probability: {shown}",
    )
    assert max(differences["command"], differences["server"]) <= 1e-5
    assert differences["ONNX"] <= 1e-4


def compare(expected: list[dict[str, float]], rows: list[list[dict]]) -> float:
    """Assert the same labels in the same order, and return the largest difference of a probability."""
    largest = 0.0
    for labels, row in zip(expected, rows, strict=True):
        assert [entry["label"] for entry in row] == list(labels)
        largest = max(largest, *(abs(entry["probability"] - labels[entry["label"]]) for entry in row))
    return largest
