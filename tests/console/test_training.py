"""Training in a terminal: the type of an event decides its message; the result comes last."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any, get_args

import pytest

from vitral.console.training import bar_fields, event_fields, message_of, result_lines, show_training, tried_lines
from vitral.training.events import (
    Candidate,
    Chosen,
    EpochEnded,
    Event,
    Finished,
    Interrupted,
    Measuring,
    Saved,
    Started,
    Stepped,
    Warned,
)

SCORES: dict[str, Any] = dict(top1=0.981, top5=0.999, images=1000, loss=0.06, top1_low=0.9705, top1_high=0.9877)
STEPPED = Stepped(step=5, steps=20, epoch=0, loss=0.5, lr=0.1, images_per_second=99.6, seconds_left=192)
EPOCH = EpochEnded(
    epoch=1, step=10, train_loss=0.25, top1=0.5, top5=0.9, loss=0.75, is_best=True, seconds=3.0
)  # fmt: skip
FINISHED = Finished(folder=Path("runs/pets-1"), test=SCORES, best_step=10, train_seconds=192.4)
EVENTS: list[Event] = [
    Chosen(name="batch_size", value=64, reason="the dataset is small"),
    Candidate(name="probe", top1=0.625, interval=(0.4, 0.8), loss=1.0, evidence="20 validation images", seconds=2.0),
    Started(folder=Path("runs/pets-1"), step=0, steps=20, steps_per_epoch=10, parameters=1000, trained=1000),
    STEPPED,
    Measuring(what="validation", done=8, total=32),
    EPOCH,
    Saved(path=Path("runs/pets-1/state"), step=10),
    Warned(message="two\x1b[31m images are unreadable"),
    FINISHED,
]
INTERRUPTED = Interrupted(step=7, resume="vitral train --resume runs/pets-1", signal=15)


def message(event: Event) -> str:
    shown = message_of(event)
    assert shown is not None
    return shown[0]


def test_every_type_of_event_is_covered() -> None:
    assert {type(event) for event in [*EVENTS, INTERRUPTED]} == set(get_args(Event))


@pytest.mark.parametrize(
    ("event", "facts"),
    [
        (EVENTS[0], ["batch_size", "64", "the dataset is small"]),
        (Chosen(name="lr", value=0.0003, reason="default"), ["0.0003"]),
        (EVENTS[1], ["probe", "62.5% (40.0% to 80.0%)", "20 validation images"]),
        (EVENTS[2], ["20 steps, 1,000 parameters: runs/pets-1"]),
        (EPOCH, ["epoch   2", "train loss 0.250", "accuracy 50.00%", "loss 0.750", "best so far"]),
        (INTERRUPTED, ["step 7", "vitral train --resume runs/pets-1"]),
    ],
)
def test_messages_state_the_facts_of_an_event(event: Event, facts: list[str]) -> None:
    assert all(fact in message(event) for fact in facts), message(event)


def test_started_states_resumed_and_partly_trained() -> None:
    event = Started(folder=Path("r"), step=3, steps=20, steps_per_epoch=10, parameters=1000, trained=10)
    assert message(event) == "20 steps, resumed at step 3, 1,000 parameters (10 trained): r"


def test_an_epoch_without_labels_has_no_accuracy() -> None:
    event = EpochEnded(epoch=0, step=1, train_loss=1, top1=nan, top5=nan, loss=2, is_best=False, seconds=1)
    assert "accuracy" not in message(event)
    assert "best so far" not in message(event)


def test_bar_shows_progress_and_eta() -> None:
    assert bar_fields(STEPPED) == dict(
        description="step 5/20", completed=5, total=20, detail="loss 0.500  100 images/s", eta="ETA 3:12"
    )
    assert bar_fields(EVENTS[4])["detail"] == "8/32 images"
    assert bar_fields(Measuring(what="writing the report", done=0, total=1))["detail"] == ""
    assert bar_fields(FINISHED) == {}


@pytest.mark.parametrize("ending", [FINISHED, INTERRUPTED])
@pytest.mark.parametrize("format", ["human", "json", "quiet"])
def test_ending_of_a_run_is_returned(format: Any, ending: Event) -> None:
    assert show_training([*EVENTS[:-1], ending], format) is ending


@pytest.mark.parametrize("format", ["human", "json", "quiet"])
def test_no_ending_without_events(format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_training([], format) is None
    assert capsys.readouterr().out == ""


def test_human_format_prints_messages_and_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    show_training(EVENTS, "human")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "Accuracy 98.10% (1,000 images, 95% CI 97.0 to 98.8) after 3:12 of training",
        "Report  runs/pets-1/report.html",
        "Model   runs/pets-1/model.safetensors",
        "Next    vitral predict runs/pets-1 IMAGE",
        "        vitral evaluate runs/pets-1",
        "        vitral report runs/pets-1 --open",
    ]
    assert "Warning: two\N{REPLACEMENT CHARACTER}[31m images" in err
    assert "\x1b" not in err


def test_candidates_are_aligned_and_the_kept_one_is_marked() -> None:
    rows = [dict(top1=0.9, interval=(0.8, 0.95), seconds=3, evidence="41 images", chosen=False, name="probe")]
    rows.append(dict(rows[0], name="probe (class token and mean, discriminant)", chosen=True))
    first, second = tried_lines(rows)
    assert first.index("90.0%") == second.index("90.0%")
    assert (first + "  <- kept").endswith(second[second.index("90.0%") :])
    assert tried_lines([]) == []


def test_suggested_commands_are_quoted_for_the_shell() -> None:
    finished = Finished(folder=Path("my runs/1"), test=SCORES, best_step=1, train_seconds=1)
    assert "Next    vitral predict 'my runs/1' IMAGE" in result_lines(finished)


def test_result_of_a_run_without_labels() -> None:
    scores = dict(top1=None, top5=None, loss=0.25, images=200, target="pixels")
    lines = result_lines(Finished(folder=Path("r"), test=scores, best_step=1, train_seconds=1))
    assert lines[0] == "Mean squared error 0.2500 on masked pixels (200 images, target pixels) after 0:01 of training"
    assert "Next    vitral train DATA --from r" in lines


@pytest.mark.parametrize(("scores", "text"), [(SCORES, "0.9810\n"), (SCORES | dict(top1=None), "0.0600\n")])
def test_quiet_format_prints_one_number(capsys: pytest.CaptureFixture[str], scores: dict[str, Any], text: str) -> None:
    show_training([*EVENTS[:-1], Finished(folder=Path("r"), test=scores, best_step=1, train_seconds=1)], "quiet")
    assert capsys.readouterr() == (text, "")


def test_json_format_writes_one_line_per_event_and_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    show_training(EVENTS, "json")
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line.pop("event") for line in lines] == [
        "chosen", "candidate", "started", "stepped", "measuring", "epochended", "saved", "warned", "finished"
    ]  # fmt: skip
    for event, line in zip(EVENTS, lines, strict=True):
        assert set(line) == {field.name for field in fields(event)}
    assert json.loads(out) == lines[-1]
    assert lines[-1]["test"] == SCORES


def test_json_has_null_for_nan_at_any_depth() -> None:
    event = Finished(folder=Path("r"), test=dict(top1=nan, rows=[nan, 1]), best_step=1, train_seconds=1)
    assert event_fields(event)["test"] == dict(top1=None, rows=[None, 1])


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("format", ["human", "json"])
def test_a_run_outlives_its_console(format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    yielded = []

    def events() -> Iterator[Event]:
        for event in EVENTS:
            yielded.append(event)
            yield event

    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    assert show_training(events(), format) is FINISHED
    assert yielded == EVENTS
    assert sys.stderr.name == os.devnull
    sys.stderr.close()


def test_console_needs_no_torch() -> None:
    modules = ("checkpoint", "output", "progress", "results", "tables", "training")
    program = "\n".join(
        ["import sys", *(f"import vitral.console.{name}" for name in modules), "assert 'torch' not in sys.modules"]
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
