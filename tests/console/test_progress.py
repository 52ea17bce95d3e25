"""Progress bars: silent unless a person watches, and transparent to results."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from vitral.console.progress import progress_bar, stages, with_progress


@dataclass(frozen=True)
class Progress:
    done: int
    total: int


def test_with_progress_returns_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_progress([Progress(1, 2), Progress(2, 2), "result"], "reading", quiet=False) == "result"
    assert capsys.readouterr() == ("", "")  # standard error is not a terminal


def test_with_progress_passes_errors_on() -> None:
    def events() -> Iterator[Progress | str]:
        yield Progress(1, 2)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        with_progress(events(), "reading", quiet=False)


def test_bars_show_count_and_eta_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("reading", quiet=False) as move:
        move(3, 4)
    with stages(quiet=False) as show_stage:
        show_stage("exporting")
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in ("reading", "3/4", "ETA", "exporting"))


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("reading", quiet=True) as move, stages(quiet=True) as show_stage:
        move(3, 4)
        show_stage("exporting")
    assert capsys.readouterr() == ("", "")
