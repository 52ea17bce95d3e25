"""``vitral evaluate``, ``predict`` and ``features`` as a person types them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitral
from tests.cli.typed import typed as run
from tests.data.pictures import class_folders


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def test_evaluate_in_three_formats(model: str) -> None:
    told = json.loads(run("evaluate", model, "--format", "json").stdout)
    assert told["test"] == {name: told[name] for name in ("top1", "top5", "images", "loss")}
    assert float(run("evaluate", model, "--format", "quiet").stdout) == pytest.approx(told["top1"], abs=1e-4)
    page = run("evaluate", model, "--temperature").stdout
    assert "95 % interval" in page
    assert "after temperature scaling" in page
    assert "images/s" in page
    assert "nearest neighbours" in run("evaluate", model, "--knn", "3").stdout


def test_evaluate_leaves_with_3_when_pictures_are_bad(model: str, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 4, "green": 4}, size=(16, 16))
    (data / "red" / "002.png").write_bytes(b"no picture")
    done = run("evaluate", model, str(data))
    assert done.returncode == 3
    assert "not counted: red/002.png" in done.stdout


def test_predict_has_a_row_for_every_picture_in_order(model: str, photos: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    words = [str(photos / "red" / "001.png"), str(bad), str(photos / "green"), str(tmp_path / "nothing.jpg")]
    done = run("predict", model, *words, "--format", "json", "--top", "2")
    assert done.returncode == 3
    rows = rows_of(done.stdout)
    assert [row["file"] for row in rows] == [
        words[0],
        words[1],
        *(str(path) for path in sorted((photos / "green").iterdir())),
        words[3],
    ]
    assert rows[0]["label"] == "red"
    assert rows[0]["probability"] == rows[0]["top"][0]["probability"]
    assert [place["label"] for place in rows[0]["top"]] == ["red", "green"]
    assert rows[1] == {"file": str(bad), "error": "empty"}
    assert rows[-1] == {"file": words[3], "error": "missing"}
    assert {row["label"] for row in rows[2:-1]} == {"green"}


def test_predict_equals_python(model: str, photos: Path) -> None:
    files = sorted(str(path) for path in photos.glob("*/*.png"))
    rows = rows_of(run("predict", model, *files, "--format", "json", "--batch-size", "7").stdout)
    for row, found in zip(rows, vitral.Predictor(model)(files), strict=True):
        assert row["label"] == found.label
        assert row["probability"] == pytest.approx(found.probability, abs=1e-5)


def test_predict_takes_patterns_and_standard_input(model: str, photos: Path) -> None:
    files = sorted(str(path) for path in (photos / "red").glob("00*.png"))
    pattern = run("predict", model, str(photos / "red" / "00*.png"), "--format", "json")
    assert [row["file"] for row in rows_of(pattern.stdout)] == files
    command = [sys.executable, "-m", "vitral", "predict", model, "-", "--format", "quiet"]
    done = subprocess.run(command, input="\n".join(files) + "\n", capture_output=True, text=True)
    assert done.stdout.split() == ["red"] * len(files), done.stderr


def test_predict_writes_tables(model: str, photos: Path, tmp_path: Path) -> None:
    strange = tmp_path / 'a "b",\nc.png'
    strange.write_bytes((photos / "red" / "000.png").read_bytes())
    out = tmp_path / "rows.csv"
    assert run("predict", model, str(strange), str(photos / "green"), "--out", str(out)).returncode == 0
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0]["file"] == str(strange)
    assert len(rows) == 31
    assert float(rows[1]["probability"]) + float(rows[1]["probability_2"]) == pytest.approx(1, abs=1e-5)
    again = run("predict", model, str(photos / "green"), "--out", str(out))
    assert again.returncode == 2
    assert "is there already" in again.stderr
    human = run("predict", model, str(strange)).stdout
    assert human.count("\n") == 1  # a line break in a name does not make a line


def names_in(path: Path) -> list[tuple[str, str | None]]:
    """Names and labels of the rows of a file."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream)) if path.suffix == ".csv" else rows_of(stream.read())
    return [(row["file"], row.get("label")) for row in rows]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("cut", [1, 40, 150, 10_000])
def test_predict_goes_on_where_the_file_was_cut(
    model: str, photos: Path, tmp_path: Path, suffix: str, cut: int
) -> None:
    strange = tmp_path / "a\nb.png"
    strange.write_bytes((photos / "red" / "000.png").read_bytes())
    words = [str(strange), str(photos), str(tmp_path / "missing.png")]
    whole, part = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"
    assert run("predict", model, *words, "--out", str(whole), "--batch-size", "16").returncode == 3
    content = whole.read_bytes()
    part.write_bytes(content[:-cut] if cut < len(content) else b"")
    assert run("predict", model, *words, "--out", str(part), "--resume", "--batch-size", "16").returncode == 3
    assert names_in(part) == names_in(whole) != []
    other = run("predict", model, str(photos), "--out", str(part), "--resume")
    assert other.returncode == 2
    assert "Row 1" in other.stderr


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("length", [0, 5, 30, 120])
def test_predict_goes_on_when_not_even_one_row_was_written(
    model: str, photos: Path, tmp_path: Path, suffix: str, length: int
) -> None:
    """Cut inside of the first row, or with nothing but the line of names."""
    whole, part = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"
    assert run("predict", model, str(photos), "--out", str(whole)).returncode == 0
    part.write_bytes(whole.read_bytes()[:length])
    assert run("predict", model, str(photos), "--out", str(part), "--resume").returncode == 0
    assert part.read_bytes() == whole.read_bytes()
    header = whole.read_bytes().partition(b"\n")[0] + b"\n"
    part.write_bytes(header)
    assert run("predict", model, str(photos), "--out", str(part), "--resume").returncode == 0
    assert names_in(part) == names_in(whole)


def test_predict_survives_kill_9(model: str, photos: Path, tmp_path: Path) -> None:
    """Killed at some moment, again and again, then left to end: every row is there, once."""
    files = [str(path) for path in sorted(photos.glob("*/*.png"))] * 10
    out = tmp_path / "rows.jsonl"
    listed = "\n".join(files)
    command = [
        sys.executable,
        "-m",
        "vitral",
        "predict",
        model,
        "-",
        "--out",
        str(out),
        "--batch-size",
        "2",
        "--resume",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
        assert process.stdin is not None
        process.stdin.write(listed)
        process.stdin.close()
        before = out.stat().st_size if out.exists() else 0
        deadline = time.monotonic() + 60
        while (not out.exists() or out.stat().st_size < before + 2000) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(rows_of("\n".join(out.read_text().splitlines()[:-1]))) < len(files)
    done = subprocess.run(command, input=listed, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = rows_of(out.read_text())
    assert [row["file"] for row in rows] == files
    assert all(row["label"] == Path(row["file"]).parent.name for row in rows)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_predict_beside_a_bar_on_a_terminal(model: str, photos: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vitral", "predict", model, str(photos), "--batch-size", "4"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
    os.close(theirs)
    out, _ = process.communicate(timeout=120)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert process.returncode == 0, shown
    assert len(out.splitlines()) == 60
    assert b"predicting" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux only")
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_no_text_has_its_row(model: str, photos: Path, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    content = (photos / "red" / "000.png").read_bytes()
    Path(os.fsdecode(bytes(folder) + b"/caf\xe9.png")).write_bytes(content)
    (folder / "a\u2028b.png").write_bytes(content)
    out = tmp_path / f"rows{suffix}"
    assert run("predict", model, str(folder), "--out", str(out)).returncode == 0
    assert [label for _, label in names_in(out)] == ["red", "red"]
    assert run("predict", model, str(folder), "--out", str(out), "--resume").returncode == 0
    assert len(names_in(out)) == 2
    assert run("predict", model, str(folder)).returncode == 0


def test_resuming_touches_no_other_file(model: str, photos: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text('{"mine": 1}')
    done = run("predict", model, str(photos), "--out", str(notes), "--resume")
    assert done.returncode == 2
    assert notes.read_text() == '{"mine": 1}'
    rows = tmp_path / "rows.csv"
    assert run("predict", model, str(photos / "red"), "--out", str(rows), "--top", "2").returncode == 0
    other = run("predict", model, str(photos / "red"), "--out", str(rows), "--top", "1", "--resume")
    assert other.returncode == 2
    assert "made with --top 2" in other.stderr
    assert run("predict", "nowhere", str(photos), "--out", str(tmp_path / "new.csv")).returncode == 2
    assert not (tmp_path / "new.csv").exists()


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_features_with_the_names_of_their_files(model: str, photos: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "bad.png").write_bytes(b"bad")
    out = tmp_path / f"x{suffix}"
    done = run("features", model, str(photos / "red"), str(tmp_path / "bad.png"), "--out", str(out))
    assert done.returncode == 3
    assert "left out" in done.stdout
    if suffix == ".npz":
        with np.load(out) as found:
            names, features = found["files"].tolist(), found["features"]
    else:
        from pyarrow.parquet import read_table

        table = read_table(out)
        names, features = table["file"].to_pylist(), np.array(table["features"].to_pylist(), np.float32)
    assert names == sorted(str(path) for path in (photos / "red").iterdir())
    assert features.shape == (30, 48)
    alone = next(vitral.Predictor(model).features([names[3]]))[1]
    assert isinstance(alone, np.ndarray)
    np.testing.assert_allclose(features[3], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("predict MODEL", "no pictures"),
        ("predict MODEL EMPTY", "no pictures in"),
        ("predict MODEL EMPTY/*.png", "Nothing matches"),
        ("predict nowhere PHOTOS", "no file or folder nowhere"),
        ("predict MODEL PHOTOS --top 0", "at least 1"),
        ("predict MODEL PHOTOS --batch-size 0", "batch_size=0"),
        ("predict MODEL PHOTOS --resume", "no --out"),
        ("predict MODEL PHOTOS --out EMPTY/x.txt", "must end in .csv or .jsonl"),
        ("predict MODEL PHOTOS --out EMPTY/no/x.csv", "cannot be used"),
        ("predict MODEL PHOTOS --precision int8", "precision="),
        ("predict MODEL PHOTOS --device tpu", "device='tpu'"),
        ("features MODEL PHOTOS --out EMPTY/x.txt", ".npz or .parquet"),
        ("evaluate MODEL nowhere", "no folder nowhere"),
        ("evaluate MODEL --knn 0", "knn=0"),
        ("evaluate MODEL --knn 2.5", "--knn 2.5 must be a whole number"),
        ("predict MODEL PHOTOS --top 2.5", "--top 2.5 must be a whole number"),
        ("evaluate MODEL --knn 100000", "knn=100000"),
        ("evaluate MODEL --few-shot 0", "few_shot=0"),
        ("evaluate MODEL --batch-size 0", "batch_size=0"),
        ("evaluate MODEL --against nowhere", "nowhere"),
        ("evaluate MODEL --label-map nothing", "nothing"),
        ("evaluate MODEL --real nothing", "nothing"),
        ("evaluate EMPTY PHOTOS", "EMPTY"),
    ],
)
def test_wrong_use_is_one_sentence_and_2(model: str, photos: Path, tmp_path: Path, words: str, reason: str) -> None:
    named = {"MODEL": model, "PHOTOS": str(photos), "EMPTY": str(tmp_path)}
    spelled = words.split()
    for name, value in named.items():
        spelled = [word.replace(name, value) for word in spelled]
        reason = reason.replace(name, value)
    done = run(*spelled)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
