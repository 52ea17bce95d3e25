"""The ``vitral`` command: finds the verb, and turns everything that goes wrong into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong use or unusable input, 3 done but some inputs failed, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from io import StringIO, TextIOWrapper

from cyclopts import App
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from vitral import __version__
from vitral.errors import VitralError
from vitral.files import printable

app = App(
    name="vitral",
    help="Vision Transformers: train them, measure them, and exchange their weights.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # main tells of it
    help_epilogue="`vitral VERB --help` tells more. `--debug` shows where an error came from.",
)
app.command("vitral.cli.train:train", help="Train on pictures; what is not said is decided, with the reason.")
app.command("vitral.cli.evaluate:evaluate", help="How good a model is, and how far to trust that.")
app.command("vitral.cli.predict:predict", help="Labels for pictures.")
app.command("vitral.cli.features:features", help="Embeddings of pictures, as npz or Parquet.")
app.command("vitral.cli.data:data", help="Look at a dataset before training on it.")
app.command("vitral.cli.models:models", help="Names, parameters, FLOPs and memory of the models.")
app.command("vitral.cli.plan:plan", help="Operations, memory, time and price of a training run, before it is begun.")
app.command(
    "vitral.cli.describe:describe", help="Any checkpoint: its dialect, config, and what became of every tensor."
)
app.command("vitral.cli.convert:convert", help="A checkpoint in another dialect, compared after writing.")
app.command("vitral.cli.export:export", help="A file for other programs, and the proof that it answers the same.")
app.command("vitral.cli.doctor:doctor", help="The device, the versions, what is missing and how to get it.")


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    settle_streams()
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words[:1] == ["train"]:
        from vitral.cli.train import gather_settings

        words = ["train", *gather_settings(words[1:])]
    words = ["/dev/stdin" if word == "-" else word for word in words]  # a lone hyphen would be taken for an option
    try:
        app(words, print_error=False, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        _leave(2, _one_sentence(error), debug, error)
    except VitralError as error:
        _leave(error.exit_code, str(error), debug, error)
    except KeyboardInterrupt:
        _leave(130, "interrupted", debug=False, error=None)
    except BrokenPipeError:  # somebody closed the pipe, as head does
        _let_go_of_the_pipe()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich turns it into this
            _let_go_of_the_pipe()
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        told = f"The memory is not enough{f' ({reason})' if reason else ''}."
        _leave(1, f"{told} Take a smaller --batch-size, or a smaller --image-size or model.", debug, error)
    except OSError as error:
        reason = error.strerror or error
        told = f"{error.filename}: {reason}." if error.filename else f"The result could not be written: {reason}."
        _leave(1, told, debug, error)


def is_out_of_memory(error: Exception) -> bool:
    """Without importing torch, whose CPU says it in words only."""
    told = str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in told


def settle_streams() -> None:
    """Names of files may hold what a terminal cannot show, and a stream may be closed. What goes to a program or comes
    from one is UTF-8 everywhere."""
    for stream in (sys.stdout, sys.stdin):
        if isinstance(stream, TextIOWrapper) and sys.platform == "win32" and not stream.isatty():
            stream.reconfigure(encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin is None:
        sys.stdin = StringIO()
    if sys.stdout is None:
        _leave(2, "Standard output is closed, and the result would go there.", debug=False, error=None)


def _let_go_of_the_pipe() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing is flushed into it at the end
    sys.exit(0)


def _one_sentence(error: CycloptsError) -> str:
    """cyclopts' message, without its line breaks and with a way on."""
    message = " ".join(str(error).split())
    if isinstance(error, UnusedCliTokensError):
        message = f"These words are not expected: {' '.join(error.unused_tokens or ())}."
    command = " ".join(["vitral", *(error.command_chain or ())])
    return f"{message} See `{command} --help`."


def _leave(code: int, message: str, debug: bool, error: Exception | None) -> None:
    if debug and error is not None:
        raise error
    if sys.stderr is not None:
        print(f"vitral: {chr(10).join(map(printable, message.split(chr(10))))}", file=sys.stderr)
    sys.exit(code)
