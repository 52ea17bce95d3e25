"""`vitral predict` and `vitral features`: rows, files, resuming, and hostile input."""

import contextlib
import csv
import io
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
import torch

import vitral
from tests.cli.typed import typed as run
from vitral.cli.main import main


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def names_in(path: Path) -> list[tuple[str, str | None]]:
    """Return the file and the label of each row of a file."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream)) if path.suffix == ".csv" else rows_of(stream.read())
    return [(row["file"], row.get("label")) for row in rows]


# ---- rows ----


def test_there_is_a_row_per_image_in_order(model: str, photos: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    words = [str(photos / "red" / "001.png"), str(bad), str(photos / "green"), str(tmp_path / "nothing.jpg")]
    done = run("predict", model, *words, "--format", "json", "--top", "2")
    assert done.returncode == 3
    rows = rows_of(done.stdout)
    green = [str(path) for path in sorted((photos / "green").iterdir())]
    assert [row["file"] for row in rows] == [words[0], words[1], *green, words[3]]
    assert rows[0]["label"] == "red"
    assert rows[0]["probability"] == rows[0]["top"][0]["probability"]
    assert [entry["label"] for entry in rows[0]["top"]] == ["red", "green"]
    assert rows[1] == {"file": str(bad), "error": "empty"}
    assert rows[-1] == {"file": words[3], "error": "missing: no such file. Check the path"}
    assert {row["label"] for row in rows[2:-1]} == {"green"}


def test_a_file_that_is_not_an_image_names_the_fix(model: str, tmp_path: Path) -> None:
    (notes := tmp_path / "notes.txt").write_text("hello\n")
    done = run("predict", model, str(notes))
    assert done.returncode == 3
    assert "not an image file (starts with b'hello\\n'). Convert it to JPEG or PNG" in done.stdout


def test_rows_equal_the_predictions_of_python(model: str, photos: Path) -> None:
    files = sorted(str(path) for path in photos.glob("*/*.png"))
    rows = rows_of(run("predict", model, *files, "--format", "json", "--batch-size", "7").stdout)
    for row, prediction in zip(rows, vitral.Predictor(model)(files), strict=True):
        assert row["label"] == prediction.label
        assert row["probability"] == pytest.approx(prediction.probability, abs=1e-5)


def test_formats_for_people_and_for_programs(model: str, photos: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    words = (str(photos / "red" / "000.png"), str(bad))
    human = run("predict", model, *words).stdout.splitlines()
    assert human[0].startswith(f"{words[0]}  red ")
    assert human[1] == f"{bad}  error: empty"
    assert run("predict", model, *words, "--format", "quiet").stdout == "red\n\n"
    first, *rows = csv.reader(run("predict", model, *words, "--format", "csv", "--top", "1").stdout.splitlines())
    assert first == ["file", "label", "probability", "unusual", "error"]
    assert [row[1] for row in rows] == ["red", ""]


def test_patterns_and_standard_input(model: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(str(path) for path in (photos / "red").glob("00*.png"))
    pattern = run("predict", model, str(photos / "red" / "00*.png"), "--format", "json")
    assert [row["file"] for row in rows_of(pattern.stdout)] == files
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(files) + "\n"))
    done = run("predict", model, "-", "--format", "quiet")
    assert done.stdout.split() == ["red"] * len(files), done.stderr


def test_a_folder_that_cannot_be_listed_is_an_error_row(
    model: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "open.png").write_bytes((photos / "red" / "000.png").read_bytes())
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    done = run("predict", model, str(tmp_path), "--format", "json")
    assert done.returncode == 3
    opened, unlisted = rows_of(done.stdout)
    assert opened["label"] == "red"
    assert unlisted["file"] == str(closed)
    assert "error" in unlisted


# ---- files ----


def test_a_table_holds_strange_names(model: str, photos: Path, tmp_path: Path) -> None:
    strange = tmp_path / 'a "b",\r\nc.png'
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
    assert "already exists" in again.stderr
    assert run("predict", model, str(strange), str(photos / "green"), "--out", str(out), "--resume").returncode == 0
    human = run("predict", model, str(strange)).stdout
    assert human.count("\n") == 1  # a line break in a name does not start a line


def test_a_file_is_summarized_on_standard_error(model: str, photos: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    done = run("predict", model, str(photos / "red" / "000.png"), str(bad), "--out", str(tmp_path / "x.csv"))
    assert done.returncode == 3
    assert "2 rows, 1 with an error" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("cut", [1, 40, 150, 10_000])
def test_resume_continues_a_cut_file(model: str, photos: Path, tmp_path: Path, suffix: str, cut: int) -> None:
    strange = tmp_path / "a\nb.png"
    strange.write_bytes((photos / "red" / "000.png").read_bytes())
    words = [str(strange), str(photos), str(tmp_path / "missing.png")]
    whole, partial = tmp_path / f"whole{suffix}", tmp_path / f"partial{suffix}"
    assert run("predict", model, *words, "--out", str(whole), "--batch-size", "16").returncode == 3
    content = whole.read_bytes()
    partial.write_bytes(content[:-cut] if cut < len(content) else b"")
    assert run("predict", model, *words, "--out", str(partial), "--resume", "--batch-size", "16").returncode == 3
    assert names_in(partial) == names_in(whole) != []
    other = run("predict", model, str(photos), "--out", str(partial), "--resume")
    assert other.returncode == 2
    assert "Row 1" in other.stderr


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("length", [0, 5, 30, 120])
def test_resume_continues_a_file_without_a_complete_row(
    model: str, photos: Path, tmp_path: Path, suffix: str, length: int
) -> None:
    """The file is cut inside the first row, or has only a header."""
    whole, partial = tmp_path / f"whole{suffix}", tmp_path / f"partial{suffix}"
    assert run("predict", model, str(photos), "--out", str(whole)).returncode == 0
    partial.write_bytes(whole.read_bytes()[:length])
    assert run("predict", model, str(photos), "--out", str(partial), "--resume").returncode == 0
    assert partial.read_bytes() == whole.read_bytes()
    partial.write_bytes(whole.read_bytes().partition(b"\n")[0] + b"\n")
    assert run("predict", model, str(photos), "--out", str(partial), "--resume").returncode == 0
    assert names_in(partial) == names_in(whole)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_resume_needs_the_same_model_and_the_same_top(model: str, photos: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"rows.{suffix}"
    assert run("predict", model, str(photos), "--out", str(out)).returncode == 0
    whole = out.read_text()
    out.write_text("\n".join(whole.split("\n")[:5]) + "\n")
    other = tmp_path / "other.safetensors"
    torch.manual_seed(7)
    network = vitral.create("vit-pico4", num_classes=2, image_size=16)
    torch.nn.init.normal_(network.head.weight)
    vitral.save(network, other, labels=["red", "green"])
    for words in ((str(other),), (model, "--top", "1")):
        done = run("predict", words[0], str(photos), "--out", str(out), "--resume", *words[1:])
        assert done.returncode == 2, words
        assert "--top" in done.stderr
        assert len(out.read_text().split("\n")) == 6  # no row was added
    assert run("predict", model, str(photos), "--out", str(out), "--resume").returncode == 0
    assert out.read_text() == whole


def test_another_model_is_noticed_even_if_the_last_image_is_gone(model: str, photos: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes((photos / "red" / f"00{number}.png").read_bytes())
    out, names = tmp_path / "rows.csv", [str(file) for file in files]
    assert run("predict", model, *names[:2], "--out", str(out)).returncode == 0
    files[1].unlink()
    other = vitral.create("vit-pico4", num_classes=2, image_size=16)
    vitral.save(other, tmp_path / "other.safetensors", labels=["red", "green"])  # a probability of 50% for every image
    before = out.read_text()
    done = run("predict", str(tmp_path / "other.safetensors"), *names, "--out", str(out), "--resume")
    assert (done.returncode, out.read_text()) == (2, before)
    assert "50.0%" in done.stderr


def test_resume_touches_no_other_file(model: str, photos: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text('{"mine": 1}')
    done = run("predict", model, str(photos), "--out", str(notes), "--resume")
    assert done.returncode == 2
    assert notes.read_text() == '{"mine": 1}'
    rows = tmp_path / "rows.csv"
    assert run("predict", model, str(photos / "red"), "--out", str(rows), "--top", "2").returncode == 0
    other = run("predict", model, str(photos / "red"), "--out", str(rows), "--top", "1", "--resume")
    assert other.returncode == 2
    assert "--top 2" in other.stderr
    assert run("predict", "nowhere", str(photos), "--out", str(tmp_path / "new.csv")).returncode == 2
    assert not (tmp_path / "new.csv").exists()


def test_more_labels_than_the_model_has_and_an_empty_label(photos: Path, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico4", num_classes=2, image_size=16), tmp_path / "m.safetensors", labels=["", "b"])
    words = ["predict", str(tmp_path / "m.safetensors"), str(photos), "--top", "9", "--out", str(tmp_path / "rows.csv")]
    assert run(*words).returncode == 0
    whole = (tmp_path / "rows.csv").read_text()
    assert whole.startswith("file,label,probability,label_2,probability_2,unusual,error\n")
    (tmp_path / "rows.csv").write_text(whole[:200])
    assert run(*words, "--resume").returncode == 0
    assert (tmp_path / "rows.csv").read_text() == whole


def test_kill_9_loses_no_row(model: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice and then resumed, the file has every row once."""
    files = [str(path) for path in sorted(photos.glob("*/*.png"))] * 10
    out = tmp_path / "rows.jsonl"
    listed = "\n".join(files)
    words = ["predict", model, "-", "--out", str(out), "--batch-size", "2", "--resume"]
    command = [sys.executable, "-m", "vitral", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
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
    monkeypatch.setattr(sys, "stdin", io.StringIO(listed))
    done = run(*words)
    assert done.returncode == 0, done.stderr
    rows = rows_of(out.read_text())
    assert [row["file"] for row in rows] == files
    assert all(row["label"] == Path(row["file"]).parent.name for row in rows)


def test_an_interrupted_command_prints_how_to_resume(model: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    words = [sys.executable, "-m", "vitral", "predict", model, *[str(photos)] * 400, "--out", str(out)]

    def default_handler() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell inherit that it is ignored

    process = subprocess.Popen(
        [*words, "--batch-size", "1"], stderr=subprocess.PIPE, text=True, preexec_fn=default_handler
    )
    while not (out.exists() and out.stat().st_size > 500):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in printed


# ---- terminals and names ----


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_shows_a_progress_bar(model: str, photos: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vitral", "predict", model, str(photos), "--batch-size", "4"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
    os.close(theirs)
    out, _ = process.communicate(timeout=120)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert process.returncode == 0, shown
    assert len(out.splitlines()) == 60
    assert b"Predicting" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has file names that are not text")
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_not_text_has_its_row(model: str, photos: Path, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "images"
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


def test_json_on_an_ascii_terminal_is_escaped(model: str, photos: Path, tmp_path: Path) -> None:
    image = tmp_path / "größe.png"
    image.write_bytes((photos / "red" / "000.png").read_bytes())
    shown = run_on_an_ascii_terminal("predict", model, str(image), "--format", "json")
    assert json.loads(shown)["file"].endswith("größe.png")


def run_on_an_ascii_terminal(*words: str) -> str:
    stream = io.BytesIO()
    terminal = io.TextIOWrapper(stream, encoding="ascii")
    with contextlib.redirect_stdout(terminal):
        main(words)
    terminal.flush()
    return stream.getvalue().decode("ascii")


def test_names_on_an_ascii_terminal_are_escaped(model: str, photos: Path, tmp_path: Path) -> None:
    image = tmp_path / "größe.png"
    image.write_bytes((photos / "red" / "000.png").read_bytes())
    assert "gr\\xf6\\xdfe.png" in run_on_an_ascii_terminal("predict", model, str(image))


# ---- failures ----


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_out_of_memory_is_one_sentence(
    model: str, photos: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("vitral.inference.predictor.Predictor.stream", fail)
    done = run("predict", model, str(photos))
    assert done.returncode == 1
    assert "Out of memory" in done.stderr
    assert "--batch-size" in done.stderr


def test_other_runtime_errors_are_not_hidden(model: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("vitral.inference.predictor.Predictor.stream", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("predict", model, str(photos))


def test_a_wrong_out_is_refused_before_the_model_is_loaded() -> None:
    assert "must end in .csv" in run("predict", "hf:nobody/nothing", "nothing.png", "--out", "x.txt").stderr


def test_format_does_not_apply_to_a_file(model: str, photos: Path, tmp_path: Path) -> None:
    done = run("predict", model, str(photos), "--out", str(tmp_path / "x.csv"), "--format", "json")
    assert done.returncode == 2
    assert "--format json" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("predict MODEL", "No images"),
        ("predict MODEL EMPTY", "no images in"),
        ("predict MODEL EMPTY/*.png", "Nothing matches"),
        ("predict nowhere PHOTOS", "nowhere"),
        ("predict MODEL PHOTOS --top 0", "--top"),
        ("predict MODEL PHOTOS --top 2.5", "--top"),
        ("predict MODEL PHOTOS --batch-size 0", "batch_size"),
        ("predict MODEL PHOTOS --batch-size 9223372036854775807", "batch_size"),
        ("predict MODEL PHOTOS --batch-size 9223372036854775808", "batch-size"),
        ("predict MODEL PHOTOS --resume", "--out"),
        ("predict MODEL PHOTOS --out EMPTY/x.txt", ".csv or .jsonl"),
        ("predict MODEL PHOTOS --out EMPTY/no/x.csv", "EMPTY/no/x.csv"),
        ("predict MODEL PHOTOS --precision int4", "precision"),
        ("predict MODEL PHOTOS --device tpu", "'tpu'"),
        ("features MODEL PHOTOS --out EMPTY/x.txt", ".npz or .parquet"),
        ("features MODEL PHOTOS --out EMPTY/no/x.npz", "EMPTY/no"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    model: str, photos: Path, tmp_path: Path, words: str, reason: str
) -> None:
    for name, value in {"MODEL": model, "PHOTOS": str(photos), "EMPTY": str(tmp_path)}.items():
        words, reason = words.replace(name, value), reason.replace(name, value)
    done = run(*words.split())
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# ---- features ----


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_features_with_the_names_of_their_files(model: str, photos: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "bad.png").write_bytes(b"bad")
    out = tmp_path / f"x{suffix}"
    done = run("features", model, str(photos / "red"), str(tmp_path / "bad.png"), "--out", str(out), "--format", "json")
    assert done.returncode == 3
    result = json.loads(done.stdout)
    assert (result["images"], result["width"], result["failed"]) == (30, 48, 1)
    assert result["failures"][0]["file"] == str(tmp_path / "bad.png")
    if suffix == ".npz":
        with np.load(out) as content:
            names, features = content["files"].tolist(), content["features"]
    else:
        from pyarrow.parquet import read_table

        table = read_table(out)
        names, features = table["file"].to_pylist(), np.array(table["features"].to_pylist(), np.float32)
    assert names == sorted(str(path) for path in (photos / "red").iterdir())
    assert features.shape == (30, 48)
    alone = next(vitral.Predictor(model).features([names[3]]))[1]
    assert isinstance(alone, np.ndarray)
    np.testing.assert_allclose(features[3], alone, atol=1e-5)


def test_skipped_images_are_printed(model: str, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"")
    words = (str(photos / "red" / "000.png"), str(tmp_path / "bad.png"), "--out", str(tmp_path / "x.npz"))
    done = run("features", model, *words)
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        f"{tmp_path / 'x.npz'}: 1 image, 48 features per image",
        f"skipped {tmp_path / 'bad.png'}: empty",
    ]


def test_warnings_about_the_checkpoint_are_printed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.conftest import small_model

    folder = tmp_path / "hf"
    vitral.save(small_model(norm_eps=1e-12), folder, dialect="huggingface")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 768}))
    np.save(tmp_path / "image.npy", np.zeros((16, 16, 3), np.uint8))
    done = run("predict", str(folder), str(tmp_path / "image.npy"))
    assert done.returncode == 0
    assert "hidden_size" in done.stderr
