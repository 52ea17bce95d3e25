"""The command without a new process for each call: what is printed, and the exit code."""

import contextlib
import io
from dataclasses import dataclass

from vitral.cli.main import main


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def typed(*words: str) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())
