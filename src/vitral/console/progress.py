"""Show how far a long task is, on standard error, with the time it still needs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Result = TypeVar("Result")


@runtime_checkable
class ProgressEvent(Protocol):
    """An event that reports how much of a task is done."""

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


class Bar(Protocol):
    """Move a progress bar to `done` of `total`."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Bar]:
    """Show a bar with the remaining time and yield the function that moves it. Remove the bar at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with _live_progress(columns, quiet=quiet) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total=None: progress.update(task, completed=done, total=total)


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a spinner and yield the function that names the current stage, for tasks of unknown length."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _live_progress(columns, quiet=quiet) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage: progress.update(task, description=stage)


def with_progress(events: Iterable[ProgressEvent | Result], title: str, *, quiet: bool) -> Result:
    """Consume events, show their progress on a bar, and return the last event that is not progress."""
    results: list[Result] = []
    with progress_bar(title, quiet=quiet) as move:
        for event in events:
            if isinstance(event, ProgressEvent):
                move(event.done, event.total)
            else:
                results = [event]
    return results[-1]


def _live_progress(columns: "Iterable[str | ProgressColumn]", *, quiet: bool) -> "AbstractContextManager[Progress]":
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_off = quiet or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=is_off, redirect_stdout=False)
