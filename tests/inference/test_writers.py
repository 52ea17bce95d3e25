"""Files of predictions: the lock, and files that --resume must refuse."""

import errno
import json
from pathlib import Path

import pytest

import vitral
from vitral.errors import ConfigError
from vitral.inference.writers import PredictionFile, predict_to_file


def images_of(photos: Path) -> list[str]:
    return sorted(str(path) for path in (photos / "test" / "red").glob("*.png"))


def test_a_file_is_written_and_reported(run: Path, photos: Path, tmp_path: Path) -> None:
    files = [*images_of(photos), str(tmp_path / "missing.png")]
    events = predict_to_file(vitral.Predictor(run, batch_size=4), files, tmp_path / "rows.jsonl", top=2)
    *progress, result = events
    assert [event.done for event in progress if not isinstance(event, PredictionFile)] == [0, 4, 8]
    assert result == PredictionFile(path=tmp_path / "rows.jsonl", rows=8, failed=1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == files
    assert len(rows[0]["top"]) == 2


def test_two_processes_do_not_write_one_file(run: Path, photos: Path, tmp_path: Path) -> None:
    predictor, out = vitral.Predictor(run), tmp_path / "rows.csv"
    first = predict_to_file(predictor, images_of(photos), out)
    next(first)
    with pytest.raises(ConfigError, match="another process"):
        list(predict_to_file(predictor, images_of(photos), out, resume=True))
    *_, result = first
    assert isinstance(result, PredictionFile)
    assert result.rows == 7
    assert len(out.read_text().splitlines()) == 8


def test_a_file_of_an_older_version_names_the_fix(run: Path, photos: Path, tmp_path: Path) -> None:
    (out := tmp_path / "rows.csv").write_text("file,label,probability,error\n")
    with pytest.raises(ConfigError, match="older version.*`unusual`.*Pass another --out"):
        list(predict_to_file(vitral.Predictor(run), images_of(photos), out, top=1, resume=True))


DEEP = "[" * 100_000
HOSTILE = {
    "another JSON file": ("jsonl", '{"mine": 1}\n'),
    "deeply nested": ("jsonl", '{"file": ' + DEEP + "\n"),
    "a huge integer": ("jsonl", '{"file": "a.png", "label": "b", "probability": 1' + "0" * 400 + ', "top": [1]}\n'),
    "a very huge integer": (
        "jsonl",
        '{"file": "a.png", "label": "b", "probability": ' + "9" * 9000 + ', "top": [1]}\n',
    ),
    "an endless row": ("jsonl", '{"file": "' + "a" * (2**24 + 10)),
    "a number for a row": ("jsonl", '{"file": "a.png", "error": "x"}\n3\n'),
    "a list of labels that is a number": ("jsonl", '{"file": "FIRST", "label": "b", "probability": 1, "top": 3}\n'),
    "not UTF-8": ("jsonl", '{"file": "\udcff"}\n'),
    "an endless cell": ("csv", "file,label,probability,error\nFIRST," + "a" * 200_000 + ",0.5,\n"),
    "endless lines in quotes": ("csv", "file,label,probability,error\n" + '"' + ("\n" * 9 + "a" * 9990 + "\n") * 1700),
    "a table of something else": ("csv", "file,size\na.png,3\n"),
    "other columns": ("csv", "file,label,probability,error\nFIRST,red\n"),
    "a probability that is a word": ("csv", "file,label,probability,error\nFIRST,red,high,\n"),
    "a zero byte": ("csv", "file,label,probability,error\n\0\n"),
    "an empty line": ("csv", "file,label,probability,error\n\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_to_resume_that_are_not_predictions(run: Path, photos: Path, tmp_path: Path, name: str) -> None:
    """They raise ConfigError, and their content stays."""
    suffix, text = HOSTILE[name]
    files = images_of(photos)
    out = tmp_path / f"rows.{suffix}"
    out.write_bytes(text.replace("FIRST", files[0]).encode("utf-8", "surrogateescape"))
    size = out.stat().st_size
    with pytest.raises(ConfigError, match="predictions|Row 1"):
        list(predict_to_file(vitral.Predictor(run), files, out, top=1, resume=True))
    assert out.stat().st_size == size


def test_a_huge_file_is_refused_at_its_first_foreign_row(run: Path, photos: Path, tmp_path: Path) -> None:
    """Without reading the rest: the file has 64 GB, most of them a hole."""
    out = tmp_path / "rows.jsonl"
    with out.open("wb") as stream:
        stream.write(b'{"file": "other.png", "error": "empty"}\n')
        stream.truncate(2**36)
    with pytest.raises(ConfigError, match="Row 1"):
        list(predict_to_file(vitral.Predictor(run), images_of(photos), out, resume=True))
    assert out.stat().st_size == 2**36


def test_top_and_suffix_are_checked(run: Path, photos: Path, tmp_path: Path) -> None:
    predictor = vitral.Predictor(run)
    with pytest.raises(ConfigError, match="top"):
        next(predict_to_file(predictor, images_of(photos), tmp_path / "x.csv", top=0))
    with pytest.raises(ConfigError, match=r"\.csv or \.jsonl"):
        next(predict_to_file(predictor, images_of(photos), tmp_path / "x.txt"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.csv"):
        next(predict_to_file(predictor, images_of(photos), tmp_path / "folder.csv", resume=True))


def test_a_full_disk_names_the_file(run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(vitral.VitralError, match=r"rows\.csv: No space left") as caught:
        list(predict_to_file(vitral.Predictor(run), images_of(photos), tmp_path / "rows.csv"))
    assert caught.value.exit_code == 1
