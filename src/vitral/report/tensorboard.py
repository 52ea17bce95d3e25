"""Write the events of a training run as TensorBoard curves.

    for event in with_tensorboard(vitral.train_events("photos/")): ...

TensorBoard's own writer writes the files and needs no torch.
"""

import time
from collections.abc import Iterable, Iterator
from math import isnan

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


def _write_curves(events: Iterable[Event]) -> Iterator[Event]:
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer: EventFileWriter | None = None
    step = 0

    def write(step: int, **content: object) -> None:
        """Write to the file at once: a state saved later must not be ahead of the curves."""
        assert writer is not None
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **content))  # pyright: ignore[reportAttributeAccessIssue]
        writer.flush()

    try:
        for event in events:
            if isinstance(event, Started):  # a resumed run discards the points of later steps
                folder = Run(event.folder).tensorboard
                while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
                    time.sleep(0.05)  # readers sort the files by the second in their names
                writer = EventFileWriter(str(folder))
                write(event.step + 1, session_log={"status": "START"})
            if isinstance(event, Started | Stepped | EpochEnded):
                step = event.step
            if writer is not None and (scalars := scalars_of(event)):
                values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
                write(step, summary={"value": values})
            yield event
    finally:
        if writer is not None:
            writer.close()


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
