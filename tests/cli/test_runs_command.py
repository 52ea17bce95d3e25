"""`vitral runs` on runs that the commands made."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.typed import typed
from vitral.runs import Run


@pytest.fixture
def folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a finished, an interrupted and a damaged run, under the default name."""
    monkeypatch.chdir(tmp_path)
    for name in ("finished", "interrupted", "damaged"):
        shutil.copytree(model, tmp_path / "runs" / name)
    (tmp_path / "runs" / "interrupted" / "report.json").unlink()
    (tmp_path / "runs" / "damaged" / "config.toml").write_text("= 3")
    return tmp_path / "runs"


def test_rows_for_people(folder: Path) -> None:
    done = typed("runs")
    assert done.returncode == 0
    test = Run(folder / "finished").test
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("runs/finished")]
    assert row[1] == "finished"
    assert row[3:6] == ["vit-pico4", f"{100 * (test.top1 or 0):.1f}%", str(test.images)]
    assert "    vitral train --resume runs/interrupted\n" in done.stdout
    assert "    runs/damaged/config.toml is damaged: " in done.stdout
    assert len(done.stdout.splitlines()) == 1 + 3 + 2


def test_rows_for_programs(folder: Path) -> None:
    rows = {row["folder"]: row for row in json.loads(typed("runs", str(folder), "--format", "json").stdout)}
    assert {Path(name).name: row["state"] for name, row in rows.items()} == {
        name: name for name in ("finished", "interrupted", "damaged")
    }
    row = rows[str(folder / "finished")]
    assert row["top1"] == Run(folder / "finished").test.top1
    assert row["minutes"] >= 0
    assert len(row["date"]) == len("2026-01-01T00:00:00+00:00")
    assert set(typed("runs", str(folder), "--format", "quiet").stdout.split()) == set(rows)


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed("runs").stdout == "No runs in runs. Start one: vitral train DATA\n"  # the default need not exist
    assert json.loads(typed("runs", "--format", "json").stdout) == []
    wrong = typed("runs", "nowhere")
    assert wrong.returncode == 2
    assert wrong.stderr == "vitral: Folder not found: nowhere. Pass the folder that contains your runs.\n"
