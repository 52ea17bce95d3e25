"""A bar with the time that is left, for anything that tells Progress on its way to a result."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Bar(Protocol):
    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Bar]:
    """On standard error; gone when it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off, redirect_stdout=False) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is being done now, and for how long; for work whose length nobody knows."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    is_off = quiet or not console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_off, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage: progress.update(task, description=stage)


def with_progress(events: Iterable[Any], title: str, *, quiet: bool) -> Any:
    """The result that comes after all Progress."""
    result = None
    with progress_bar(title, quiet=quiet) as move:
        for event in events:
            if hasattr(event, "done"):
                move(event.done, event.total)
            else:
                result = event
    return result
