"""The public functions that combine packages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitral.training.entry import train as begin_training
from vitral.training.events import Event, Finished, Measuring


def train_events(data: str | Path | None = None, **options: Any) -> Iterator[Event]:
    """Train, and yield what happens as events; the report is written before the last one."""
    return with_report(begin_training(data, **options))


def with_report(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events; write the report before the last one."""
    from vitral.report.page import write_report

    for event in events:
        if isinstance(event, Finished):
            yield Measuring(what="writing the report", done=0, total=1)
            write_report(event.folder)
        yield event
