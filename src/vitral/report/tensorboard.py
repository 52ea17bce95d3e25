"""A training run as curves in TensorBoard: reads the events that the console reads, and hands each of them on.

    for event in with_tensorboard(vitral.train("photos/")): ...

The files are written by TensorBoard's own writer, which does without torch, as everything in this room.
"""

import time
from collections.abc import Iterable, Iterator
from math import isnan
from pathlib import Path
from typing import Any

from vitral.errors import missing_package
from vitral.runs import Run
from vitral.training.events import EpochEnded, Event, Finished, Started, Stepped


def with_tensorboard(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, also written as curves. A missing package is told at once, before anything is trained."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError:
        raise missing_package("tensorboard", "tensorboard", "--tensorboard") from None
    return _written(events)


def has_curves(run: Path) -> bool:
    """Whether a run wrote curves before, so that it goes on with them when it is resumed."""
    return Run(run).tensorboard.is_dir()


def _written(events: Iterable[Event]) -> Iterator[Event]:
    curves: Curves | None = None
    step = 0
    try:
        for event in events:
            if isinstance(event, Started):
                curves = Curves(Run(event.folder).tensorboard, after=event.step)
            step = getattr(event, "step", step)
            if curves is not None and (scalars := scalars_of(event)):
                curves.add(step, scalars)
            yield event
    finally:
        if curves is not None:
            curves.close()


def scalars_of(event: Event) -> dict[str, float]:
    """What an event adds to the curves."""
    match event:
        case Stepped():
            found = {"loss": event.loss, "lr": event.lr, "images_per_second": event.images_per_second}
            return {f"train/{name}": value for name, value in found.items()}
        case EpochEnded():
            found = {"validation/top1": event.top1, "validation/loss": event.loss}
            return {name: value for name, value in found.items() if not isnan(value)}
        case Finished():
            held = {name: event.test[name] for name in ("top1", "top5", "loss")}
            return {f"test/{name}": value for name, value in held.items() if value is not None}
    return {}


class Curves:
    """Event files in a folder. A run that goes on after a step first takes back what was written of later steps."""

    def __init__(self, folder: Path, after: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder))
        self.write(after + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, scalars: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self.write(step, summary=Summary(value=values))

    def write(self, step: int, **content: Any) -> None:
        """To the file at once: a state that is saved next must not know of steps that the curves lack."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self.writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
