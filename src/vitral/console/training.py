"""Show a training run: choices, progress with the remaining time, one line per epoch, and the result."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vitral.console.output import Format, print_line, print_lines, show_as
from vitral.report.text import format_accuracy, format_clock, format_percent, masked_patches_lines
from vitral.runs import Run, quote
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

Ending = Finished | Interrupted


def show_training(events: Iterable[Event], format: Format) -> Ending | None:
    """Show the progress of a run on standard error and its result on standard output; return the last event."""
    ending = show_progress(events, format)
    if isinstance(ending, Finished):
        show_result(ending, format)
    return ending


def show_progress(events: Iterable[Event], format: Format) -> Ending | None:
    """Show the events of a run on standard error: a bar and messages, JSON or nothing. Return the one that ended it."""
    ending: Ending | None = None
    for event in {"human": _show_on_bar, "json": _show_as_json, "quiet": iter}[format](events):
        if isinstance(event, Finished | Interrupted):
            ending = event
    return ending


def show_result(finished: Finished, format: Format) -> None:
    """Print the result of a finished run to standard output."""
    top1, loss = finished.test["top1"], finished.test["loss"]
    score = f"{loss if top1 is None else top1:.4f}"
    show_as(format, json=event_fields(finished), quiet=[score], human=lambda: print_lines(result_lines(finished)))


def result_lines(finished: Finished) -> list[str]:
    """Return the test score, the paths of the report and the model, and what to try next."""
    run, scores = Run(finished.folder), finished.test
    folder = quote(str(finished.folder))
    if "target" in scores:
        score, *_ = masked_patches_lines(scores)
        commands = [f"vitral train DATA --from {folder}", f"vitral evaluate {folder} DATA --knn 10"]
    else:
        score = format_accuracy(scores)
        commands = [f"vitral predict {folder} IMAGE", f"vitral evaluate {folder}"]
    trained = format_clock(finished.train_seconds)
    tried = run.read_report().get("candidates") or ()
    return [
        *(("        " if number else "Tried   ") + line for number, line in enumerate(tried_lines(tried))),
        score if finished.best_step == 0 and finished.train_seconds < 1 else f"{score} after {trained} of training",
        f"Report  {run.report}",
        f"Model   {run.model}",
        f"Next    {commands[0]}",
        *(f"        {command}" for command in [*commands[1:], f"vitral report {folder} --open"]),
    ]


def tried_lines(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of candidates, a line each; an arrow marks the one that was kept."""
    width = max((len(candidate["name"]) for candidate in candidates), default=0)
    lines: list[str] = []
    for candidate in candidates:
        low, high = (format_percent(bound) for bound in candidate["interval"])
        accuracy = f"{format_percent(candidate['top1'])} ({low} to {high})"
        mark = "  <- kept" if candidate["chosen"] else ""
        seconds, evidence = format_clock(candidate["seconds"]), candidate["evidence"]
        lines.append(f"{candidate['name']:<{width}}  {accuracy:<24} {seconds:>5}  {evidence}{mark}")
    return lines


def message_of(event: Event) -> tuple[str, str | None] | None:
    """Return the line that an event adds to the console and its style, or None if it only moves the bar."""
    match event:
        case Chosen():
            value = f"{event.value:g}" if isinstance(event.value, float) else str(event.value)
            return f"{event.name:<20} {value:<16} {event.reason}", "dim"
        case Candidate():
            low, high = (format_percent(bound) for bound in event.interval)
            accuracy = f"{format_percent(event.top1)} ({low} to {high})"
            return f"{event.name:<49} {accuracy:<25} {event.evidence}", None
        case Started():
            if not event.steps:
                return f"linear probe, {event.parameters:,} parameters: {event.folder}", "bold"
            resumed = f", resumed at step {event.step}" if event.step else ""
            trained = "" if event.trained == event.parameters else f" ({event.trained:,} trained)"
            return f"{event.steps} steps{resumed}, {event.parameters:,} parameters{trained}: {event.folder}", "bold"
        case EpochEnded():
            accuracy = "" if isnan(event.top1) else f" accuracy {event.top1:.2%}"
            validation = f"validation{accuracy} loss {event.loss:.3f}"
            best = "  best so far" if event.is_best else ""
            return f"epoch {event.epoch + 1:>3}  train loss {event.train_loss:.3f}  {validation}{best}", None
        case Warned():
            return f"Warning: {event.message}", "yellow"
        case Interrupted():
            return f"Interrupted at step {event.step}. The state is saved. Resume with:\n  {event.resume}", "bold"
        case _:
            return None


def bar_fields(event: Event) -> dict[str, Any]:
    """Return the fields of the progress bar that an event changes."""
    match event:
        case Stepped():
            return dict(
                description=f"step {event.step}/{event.steps}",
                completed=event.step,
                total=event.steps,
                detail=f"loss {event.loss:.3f}  {event.images_per_second:.0f} images/s",
                eta=f"ETA {format_clock(event.seconds_left)}",
            )
        case Measuring():
            detail = f"{event.done}/{event.total} images" if event.total > 1 else ""
            return dict(description=event.what, detail=detail, eta="")
        case Saved() | EpochEnded():
            return dict(description="training", detail="", eta="")
        case _:
            return {}


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event as JSON values; NaN becomes null."""
    text = json.dumps(asdict(event), default=lambda value: str(value) if isinstance(value, Path) else repr(value))
    return json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))


class PersistentConsole(Console):
    """A console that a closed pipe silences; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _silence_stderr()


def _show_on_bar(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events while a bar and their messages show them on standard error."""
    console = PersistentConsole(stderr=True)
    description, detail, eta = map(TextColumn, ("{task.description}", "{task.fields[detail]}", "{task.fields[eta]}"))
    columns = (description, BarColumn(bar_width=None), detail, TimeElapsedColumn(), eta)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the dataset", total=None, detail="", eta="")
        for event in events:
            if fields := bar_fields(event):
                bar.update(task, **fields)
            if message := message_of(event):
                with _surviving_stderr():
                    print_line(*message, console=console)
            yield event


def _show_as_json(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events and write each as one line of JSON to standard error."""
    for event in events:
        content = {"event": type(event).__name__.lower(), **event_fields(event)}
        with _surviving_stderr():
            sys.stderr.write(json.dumps(content) + "\n")
        yield event


@contextmanager
def _surviving_stderr() -> Iterator[None]:
    """Keep the run alive if nobody reads standard error any more."""
    try:
        yield
    except OSError:
        _silence_stderr()


def _silence_stderr() -> None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)
