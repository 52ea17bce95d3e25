"""`vitral report`: open the report of a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, Switch
from vitral.console.output import Format, show_as, show_lines


def report(
    run: Path,
    /,
    *,
    open: Annotated[Switch, Parameter(help="Open the page in the web browser.")] = False,
    overwrite: Annotated[Switch, Parameter(help="Write the page again, even if it exists.")] = False,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet.")] = "human",
) -> None:
    """Print the path of a run's report, or open it.

    Writes the page and the model card from the files of the run if the page is missing.

    Parameters
    ----------
    run
        The folder of a finished run.

    Examples
    --------
    vitral report runs/photos-1 --open
    vitral report runs/photos-1 --overwrite
    """
    import webbrowser

    from vitral.report.page import write_report
    from vitral.runs import Run

    page = Run.open(run).report
    if overwrite or not page.is_file():
        page = write_report(run)
    show_as(format, json={"report": str(page)}, quiet=[str(page)], human=lambda: show_lines([str(page)]))
    if open:
        webbrowser.open(page.resolve().as_uri())
