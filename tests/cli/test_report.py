"""`vitral report`: the page of a run, written when it is missing."""

import json
import shutil
import webbrowser
from pathlib import Path

import pytest

from vitral.cli.main import main

OLD_RUN = Path(__file__).parent.parent / "fixtures" / "run-0.1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(OLD_RUN, tmp_path / "old run")


def test_missing_page_is_written_and_its_path_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run)])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "16.2%" in (run / "report.html").read_text(encoding="utf-8")


def test_existing_page_is_kept_unless_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").write_text("mine")
    main(["report", str(run), "--format", "json"])
    assert json.loads(capsys.readouterr().out) == {"report": str(run / "report.html")}
    assert (run / "report.html").read_text() == "mine"
    main(["report", str(run), "--overwrite"])
    assert (run / "report.html").read_text(encoding="utf-8") != "mine"


def test_open_starts_the_browser(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    main(["report", str(run)])
    assert opened == []
    main(["report", str(run), "--open"])
    assert opened == [(run / "report.html").as_uri()]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["report", str(tmp_path)])
    assert exited.value.code == 2
    assert "config.toml" in capsys.readouterr().err
