"""Run the command in this process and return what it prints and its exit code."""

import contextlib
import io
from dataclasses import dataclass

from vitral.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def typed(*words: str) -> Done:
    """Run `vitral` with these arguments."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())
