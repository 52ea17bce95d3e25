"""Write the events of a training run as TensorBoard curves.

    for event in with_tensorboard(vitral.train_events("photos/")): ...

TensorBoard's own writer writes the files and needs no torch.
"""

import time
from collections.abc import Iterable, Iterator
from math import isnan
from pathlib import Path

from vitral.errors import missing_package
from vitral.runs import Run
from vitral.training.events import EpochEnded, Event, Finished, Started, Stepped


def with_tensorboard(events: Iterable[Event]) -> Iterator[Event]:
    """Return the same events and write their scores as curves. Raise MissingError at once without tensorboard."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError:
        raise missing_package("tensorboard", "tensorboard", "--tensorboard") from None
    return _write_curves(events)


def has_curves(folder: Path) -> bool:
    """Return whether a run has written curves, so that a resumed run continues them."""
    return Run(folder).tensorboard.is_dir()


def _write_curves(events: Iterable[Event]) -> Iterator[Event]:
    curves: Curves | None = None
    step = 0
    try:
        for event in events:
            if isinstance(event, Started):
                curves = Curves(Run(event.folder).tensorboard, after=event.step)
            if isinstance(event, Started | Stepped | EpochEnded):
                step = event.step
            if curves is not None and (scalars := scalars_of(event)):
                curves.add(step, scalars)
            yield event
    finally:
        if curves is not None:
            curves.writer.close()


def scalars_of(event: Event) -> dict[str, float]:
    """Return the points that an event adds to the curves, by tag."""
    match event:
        case Stepped():
            names = ("loss", "lr", "images_per_second")
            return {f"train/{name}": getattr(event, name) for name in names}
        case EpochEnded():
            scores = {"validation/top1": event.top1, "validation/loss": event.loss}
            return {tag: value for tag, value in scores.items() if not isnan(value)}
        case Finished():
            scores = {f"test/{name}": event.test[name] for name in ("top1", "top5", "loss")}
            return {tag: value for tag, value in scores.items() if value is not None}
        case _:
            return {}


class Curves:
    """Event files in a folder. A run that resumes after step `after` discards the points of later steps."""

    def __init__(self, folder: Path, after: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder))
        self._write(after + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to each curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: object) -> None:
        """Write to the file at once: a state saved later must not be ahead of the curves."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self.writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self.writer.flush()
