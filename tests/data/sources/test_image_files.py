"""Image files by what a person types."""

import io
import json
from pathlib import Path

import pytest

import vitral
from tests.data.images import class_folders
from tests.data.sources.test_folder import unlisted
from vitral.data.dataset import FileSource
from vitral.data.headers import BadImageError
from vitral.data.sources.image_files import find_images


def find(folder: Path, *words: str) -> list[str]:
    names = find_images([str(folder / word) for word in words], io.StringIO())
    return [Path(name).relative_to(folder).as_posix() for name in names]


def test_patterns_take_folders_and_broken_links(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 1})
    (tmp_path / "dog" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    images = ["cat/000.png", "cat/001.png", "dog/000.png"]
    assert find(tmp_path, "*") == images
    assert find(tmp_path, "[cd]*") == images
    assert find(tmp_path, "**") == [*images, "dog/notes.txt"]  # a named file gets a row
    assert find(tmp_path, "**/*.png") == images
    (tmp_path / "dog" / "gone[1].png").symlink_to(tmp_path / "nowhere")
    assert find(tmp_path, "dog/*.png") == ["dog/000.png", "dog/gone[1].png"]
    assert find(tmp_path, "dog/gone[1].png") == ["dog/gone[1].png"]


def test_patterns_that_match_no_image(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(vitral.DataError, match="no images in .*empty"):
        find(tmp_path, "e*")
    with pytest.raises(vitral.DataError, match="Nothing matches"):
        find(tmp_path, "x*")


@pytest.mark.parametrize("name", ["", "dog", "dog/more"])
def test_folders_that_cannot_be_listed_stay_in_the_list(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2, "dog/more": 1})
    unlisted(monkeypatch, tmp_path / name)
    folder = tmp_path / name
    names = find_images([str(tmp_path)], io.StringIO())
    assert names[-1] == str(folder)
    assert len(names) == {"": 1, "dog": 3, "dog/more": 5}[name]
    with pytest.raises(BadImageError, match="unreadable: Permission denied"):
        FileSource(names[-1]).read()
    if name:
        assert str(folder) in find_images([str(tmp_path / "*")], io.StringIO())


def test_predict_writes_an_error_row_for_a_folder_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vitral.cli.predict import predict

    class_folders(tmp_path, {"cat": 2, "dog": 2})
    unlisted(monkeypatch, tmp_path / "dog")
    with pytest.raises(SystemExit) as caught:
        predict("vit-cifar10", str(tmp_path), format="json")
    assert caught.value.code == 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(row["file"]).name for row in rows] == ["000.png", "001.png", "dog"]
    assert ["error" in row for row in rows] == [False, False, True]
    assert "Permission denied" in rows[2]["error"]
