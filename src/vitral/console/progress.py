"""Show how far a long task is, on standard error, with the time it still needs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Result = TypeVar("Result")


@runtime_checkable
class ProgressEvent(Protocol):
    """An event that reports how much of a task is done."""

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the remaining time and yield the function that moves it. Remove the bar at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with _live_progress(*columns, quiet=quiet) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a spinner and yield the function that names the current stage, for tasks of unknown length."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _live_progress(*columns, quiet=quiet) as update:
        yield lambda stage: update(description=stage)


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


@contextmanager
def _live_progress(*columns: "ProgressColumn", quiet: bool) -> Iterator[Callable[..., None]]:
    """Show one task and yield the function that updates its fields."""
    from rich.progress import Progress

    console = Console(stderr=True)
    is_off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off, redirect_stdout=False) as progress:
        yield partial(progress.update, progress.add_task("", total=None))
