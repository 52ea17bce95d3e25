"""Pictures by the words that a person types."""

import io
from pathlib import Path

import pytest

import vitral
from tests.data.pictures import class_folders
from vitral.data.sources.image_files import find_images


def found(folder: Path, *words: str) -> list[str]:
    names = find_images([str(folder / word) for word in words], io.StringIO())
    return [Path(name).relative_to(folder).as_posix() for name in names]


def test_patterns_take_folders_and_broken_links(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 1})
    (tmp_path / "dog" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    pictures = ["cat/000.png", "cat/001.png", "dog/000.png"]
    assert found(tmp_path, "*") == pictures
    assert found(tmp_path, "[cd]*") == pictures
    assert found(tmp_path, "**") == [*pictures, "dog/notes.txt"]  # a file that is named gets a row
    assert found(tmp_path, "**/*.png") == pictures
    (tmp_path / "dog" / "gone[1].png").symlink_to(tmp_path / "nowhere")
    assert found(tmp_path, "dog/*.png") == ["dog/000.png", "dog/gone[1].png"]
    assert found(tmp_path, "dog/gone[1].png") == ["dog/gone[1].png"]


def test_patterns_that_match_no_picture(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(vitral.DataError, match="no pictures in .*empty"):
        found(tmp_path, "e*")
    with pytest.raises(vitral.DataError, match="Nothing matches"):
        found(tmp_path, "x*")
