"""`vitral runs`: list the runs in a folder."""

from pathlib import Path
from typing import Annotated

from vitral.cli.parameters import Format, option
from vitral.console.output import show_as
from vitral.console.tables import show_runs
from vitral.runs import list_runs

DEFAULT = Path("runs")


def runs(
    dir: Path = DEFAULT,
    /,
    *,
    format: Annotated[Format, option("human, json or quiet (folders only).")] = "human",
) -> None:
    """List finished, running and interrupted runs, newest first.

    Shows the accuracy on the test split, and the command that resumes each interrupted run. A damaged run is listed
    with the reason.

    Parameters
    ----------
    dir
        A folder that contains runs, also in folders below it.

    Examples
    --------
    vitral runs
    vitral runs studies/ --format json
    """
    rows = list_runs(dir) if dir.exists() or dir != DEFAULT else []
    content = [run.as_dict() for run in rows]
    show_as(format, json=content, quiet=(run.folder for run in rows), human=lambda: show_runs(rows, dir))
