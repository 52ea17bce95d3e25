"""`vitral study`: run an ablation study."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import vitral
from vitral.cli.parameters import Format, Integer, option
from vitral.console.output import show_as, show_lines

if TYPE_CHECKING:
    from vitral.studies.runner import CellOutcome


def study(
    file: str,
    data: str,
    /,
    *,
    out: Annotated[Path, option("Folder of the runs.", "DIR")] = Path("runs/studies"),
    results: Annotated[
        Path | None, option("Folder of the page and the plot.", "DIR", show_default="results in --out")
    ] = None,
    seeds: Annotated[
        list[int] | None, option("Seeds to use instead of those of FILE.", "N...", negative="", consume_multiple=True)
    ] = None,
    jobs: Annotated[Integer, option("Number of cells to train at a time.")] = 2,
    threads: Annotated[Integer, option("CPU threads per cell.")] = 1,
    format: Format = "human",
) -> None:
    """Run an ablation study.

    Trains and evaluates every cell of FILE, and writes a page with a table and a plot. Finished cells are skipped and
    interrupted ones resume, so run the same command again to continue.

    Parameters
    ----------
    file
        A TOML file, or the name of a shipped study such as positions.
    data
        A dataset with a test split.

    Examples
    --------
    vitral study positions builtin:digits
    vitral study my.toml photos/ --seeds 0 1 2 --jobs 4 --out runs/ablation
    """

    def show(outcome: "CellOutcome") -> None:
        if format == "human":
            show_lines([describe_outcome(outcome)])

    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cells save their state before it exits
    try:
        result = vitral.run_study(
            file, data, out=out, results=results, seeds=seeds, jobs=jobs, threads=threads, on_cell=show
        )
    except KeyboardInterrupt:
        print("vitral: interrupted. Run the same command to resume.", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, handler)
    page = [] if result.page is None else [str(result.page)]
    show_as(format, json=result.as_dict(), quiet=page, human=lambda: show_lines(page))
    if result.failed:
        sys.exit(1)


def describe_outcome(outcome: "CellOutcome") -> str:
    """Return one line such as "[3/8] mean, seed 0: top-1 57.41 % (5.4 minutes)"."""
    head = f"[{outcome.done}/{outcome.total}] {outcome.cell}, seed {outcome.seed}"
    if outcome.status == "failed":
        return f"{head}: failed: {outcome.reason}"
    if outcome.status == "skipped":
        return f"{head}: already finished"
    scores = ", ".join(f"{name} {100 * score:.2f} %" for name, score in outcome.scores.items())
    return f"{head}: {scores or 'finished'} ({outcome.seconds / 60:.1f} minutes)"
