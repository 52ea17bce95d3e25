"""A training run on the console: decisions, a bar with the time that is left, a line an epoch, and the result."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral.console.output import Format, human_console
from vitral.files import printable

if TYPE_CHECKING:
    from vitral.training.events import Event


def shower(format: Format) -> "Callable[[Iterable[Event]], dict[str, Any] | None]":
    """What shows events in a format, and gives back how the run ended."""
    return {"human": show_human, "json": show_lines_of_json, "quiet": show_quiet}[format]


def show_lines_of_json(events: "Iterable[Event]") -> dict[str, Any] | None:
    """Every event as a line on standard error; the last one is the result."""
    ended: dict[str, Any] | None = None
    for event in events:
        content = {"event": type(event).__name__.lower(), **_told(event)}
        with kept_going():
            sys.stderr.write(json.dumps(content, default=_plain) + "\n")
        ended = _ending(event) or ended
    return ended


@contextmanager
def kept_going() -> Iterator[None]:
    """A run is worth more than its console: where nobody listens any more, it goes on without."""
    try:
        yield
    except OSError:
        fall_silent()


def fall_silent() -> None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)


def show_quiet(events: "Iterable[Event]") -> dict[str, Any] | None:
    ended = None
    for event in events:
        ended = _ending(event) or ended
    if ended and "test" in ended:
        held = ended["test"]
        sys.stdout.write(f"{held['loss'] if held['top1'] is None else held['top1']:.4f}\n")
    return ended


def _ending(event: "Event") -> dict[str, Any] | None:
    kind = type(event).__name__
    if kind in ("Finished", "Interrupted"):
        return json.loads(json.dumps(_told(event), default=_plain))
    return None


def _told(event: "Event") -> dict[str, Any]:
    """JSON has no word for what is no number."""
    told = asdict(event)
    return {name: None if isinstance(value, float) and isnan(value) else value for name, value in told.items()}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else repr(value)


def show_human(events: "Iterable[Event]") -> dict[str, Any] | None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    class Lasting(Console):
        def on_broken_pipe(self) -> None:  # rich would leave
            self.quiet = True
            fall_silent()

    console = Lasting(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    ended: dict[str, Any] | None = None
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking at the data", total=None, told="", left="")
        for event in events:
            if change := _change_of_bar(event):
                bar.update(task, **change)
            with kept_going():
                for line, style in lines_of(event):
                    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
            ended = _ending(event) or ended
    if ended and "test" in ended:
        show_result(ended)
    return ended


def _change_of_bar(event: "Event") -> dict[str, Any]:
    told: Any = event
    match type(event).__name__:
        case "Stepped":
            return dict(
                description=f"step {told.step}/{told.steps}",
                completed=told.step,
                total=told.steps,
                told=f"loss {told.loss:.3f}  {told.images_per_second:.0f} images/s",
                left=f"{as_clock(told.seconds_left)} left",
            )
        case "Measuring":
            if told.total == 1:
                return dict(description=told.what, told="", left="")
            return dict(description=f"measuring: {told.what}", told=f"{told.done}/{told.total} pictures", left="")
        case "Saved" | "EpochEnded":
            return dict(description="training", told="", left="")
    return {}


def lines_of(event: "Event") -> list[tuple[str, str | None]]:
    told: Any = event
    match type(event).__name__:
        case "Chosen":
            return [(f"{told.name:<20} {_value(told.value):<16} {told.reason}", "dim")]
        case "Baseline":
            line = (
                f"before training: {told.knn:.1%} by nearest neighbours, {told.few_shot:.1%} by ten pictures a class "
                f"({told.pictures} pictures of the validation)"
            )
            return [(line, None)]
        case "Started":
            went = f" from step {told.step}" if told.step else ""
            part = "" if told.trained == told.parameters else f", {told.trained:,} of them trained"
            return [(f"{told.steps} steps{went}, {told.parameters:,} parameters{part}: {told.folder}", "bold")]
        case "EpochEnded":
            best = "  best so far" if told.is_best else ""
            right = "" if isnan(told.top1) else f" {told.top1:.2%},"
            validation = f"validation{right} loss {told.loss:.3f}"
            line = f"epoch {told.epoch + 1:>3}  loss {told.train_loss:.3f}  {validation}{best}"
            return [(line, None)]
        case "Warned":
            return [(f"warning: {printable(told.message)}", "yellow")]
        case "Interrupted":
            return [(f"Interrupted at step {told.step}; the state is saved. Go on with:\n  {told.resume}", "bold")]
    return []


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_result(ended: dict[str, Any]) -> None:
    console = human_console()
    scores = ended["test"]
    if "target" in scores:
        show_filled_in(ended)
        return
    interval = f"95 % interval {scores['top1_low']:.2%} to {scores['top1_high']:.2%}"
    console.print(
        f"held out: {scores['top1']:.2%} right of {scores['images']:,} pictures ({interval}), "
        f"after {as_clock(ended['train_seconds'])}",
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    folder = ended["folder"]
    for what, path in (("report", f"{folder}/report.html"), ("model", f"{folder}/model.safetensors")):
        console.print(f"{what:<7} {path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"try     vitral predict {folder} PICTURE", highlight=False, markup=False, soft_wrap=True)


def show_filled_in(ended: dict[str, Any]) -> None:
    """The result of a run without labels."""
    console, folder, scores = human_console(), ended["folder"], ended["test"]
    found = ""
    if scores["target"] != "pixels":
        always = f"{scores['commonest']:.2%} by always saying the commonest"
        found = f"{scores['top1']:.2%} of the hidden colours found ({always}), "
    time = as_clock(ended["train_seconds"])
    console.print(
        f"held out: {found}loss {scores['loss']:.4f}, {scores['images']:,} pictures, after {time}",
        style="bold",
        highlight=False,
    )
    for what, path in (("report", f"{folder}/report.html"), ("model", f"{folder}/model.safetensors")):
        console.print(f"{what:<7} {path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"try     vitral train DATA --from {folder}", highlight=False, markup=False, soft_wrap=True)


def as_clock(seconds: float) -> str:
    """3:12, or 1:03:12."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def show_settings(rows: Iterable[tuple[str, object, str]], recipes: Iterable[str]) -> None:
    """Every setting, its default and what it means."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "default", "meaning"):
        table.add_column(title)
    for name, value, text in rows:
        table.add_row(f"--{name.replace('_', '-')}", _value(value), text)
    console = human_console()
    console.print(table)
    console.print(f"\nRecipes: {', '.join(recipes)}.", highlight=False)
