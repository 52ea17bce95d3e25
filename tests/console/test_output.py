"""Output helpers: text is printed literally, at any width."""

import json

import pytest

from vitral.console.output import MIN_WIDTH, human_console, print_line, show_as, show_lines


def test_lines_are_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("[red]x[/red] \x1b[31m " + "word " * 60 + "\nsecond", "bold")
    assert capsys.readouterr().out == "[red]x[/red] \N{REPLACEMENT CHARACTER}[31m " + "word " * 60 + "\nsecond\n"


@pytest.mark.parametrize(("columns", "width"), [("20", MIN_WIDTH), ("120", 120)])
def test_console_is_never_too_narrow_for_numbers(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert human_console().width == width


def test_results_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show_as("json", json={"label": "犬"}, human=lambda: None)
    show_lines(["1", "2"])
    out, err = capsys.readouterr()
    assert json.loads(out[: out.index("}") + 1]) == {"label": "犬"}
    assert out.endswith("1\n2\n")
    assert err == ""
