"""The `vitral` command: find the command, call it, and turn every failure into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 usage error or unusable input, 3 done but some inputs failed, 130 interrupted,
143 terminated.
"""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO, TextIOWrapper
from types import FrameType
from typing import NoReturn

from cyclopts import App, Group
from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from vitral import __version__
from vitral.cli.help import PlainHelp, examples
from vitral.cli.launch import let_first_print, silence_other_ranks
from vitral.errors import VitralError
from vitral.files import printable

COMMANDS = {
    "Train": {
        "train": "DATA [OPTIONS]",
        "data": "DATA [OPTIONS]",
        "plan": "--model MODEL [OPTIONS]",
        "study": "FILE.toml DATA [OPTIONS]",
        "runs": "[DIR] [OPTIONS]",
    },
    "Use": {
        "predict": "MODEL IMAGES... [OPTIONS]",
        "evaluate": "MODEL [DATA] [OPTIONS]",
        "features": "MODEL IMAGES... --out FILE [OPTIONS]",
        "inspect": "MODEL IMAGES... [OPTIONS]",
        "serve": "MODEL [OPTIONS]",
        "report": "RUN [OPTIONS]",
    },
    "Checkpoints": {
        "models": "[WORDS...] [OPTIONS]",
        "describe": "MODEL [OPTIONS]",
        "convert": "MODEL TARGET --to DIALECT [OPTIONS]",
        "export": "MODEL --to FORMAT [OPTIONS]",
    },
    "System": {"bench": "[OPTIONS]", "doctor": "[OPTIONS]"},
}
"""The commands with their arguments, as `vitral --help` groups them. Each is a function in a module of its name."""
SHARED_MODULES = {"plan": "models", "features": "predict", "report": "train"}
SHARED_MODULES |= dict.fromkeys(("describe", "convert", "export"), "checkpoints")
"""The commands whose module has another name."""

app = App(
    name="vitral",
    help="Train, use and exchange Vision Transformers.",
    usage="vitral COMMAND [OPTIONS]",
    version=__version__,
    help_format="plaintext",
    help_formatter=PlainHelp(),
    help_epilogue="Run `vitral COMMAND --help` for its options. Add --debug to see where an error came from.",
    group_commands=Group("Options", sort_key=len(COMMANDS)),  # only --help and --version are left for it
    group_parameters=Group("Options"),
    suppress_keyboard_interrupt=False,  # main reports it
)


for order, (title, commands) in enumerate(COMMANDS.items()):
    group = Group(title, sort_key=order)
    for position, (name, arguments) in enumerate(commands.items()):  # a module is imported when it is needed
        path = f"vitral.cli.{SHARED_MODULES.get(name, name)}:{name}"
        app.command(path, group=group, sort_key=position, usage=f"vitral {name} {arguments}")

SWITCHES = frozenset({"compile", "gradient_checkpointing", "tune.probe"})
"""Training settings that are true or false and need no value."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: the command line) and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    configure_streams()
    silence_other_ranks()
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        with exit_on_sigterm():
            app(prepare(words), print_error=False, exit_on_error=False, result_action="return_value")
            sys.stdout.flush()
    except CycloptsError as error:
        _exit(2, _one_sentence(error), debug, error)
    except VitralError as error:
        _exit(error.exit_code, str(error), debug, error)
    except KeyboardInterrupt as interrupt:
        again = f"{interrupt}\n  vitral {shlex.join(words)}"
        _exit(130, again if str(interrupt) else "Interrupted.", debug=False, error=None)
    except BrokenPipeError:  # the reader closed the pipe, as head does
        _discard_output()
        sys.exit(0)
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich raises it instead
            _discard_output()
            sys.exit(0)
        raise
    except (MemoryError, RuntimeError) as error:
        if is_lost_process(error):
            _exit(1, describe_lost_process(), debug, error)
        if not is_out_of_memory(error):
            raise
        _exit(1, "Out of memory. Reduce --batch-size, --image-size or the model.", debug, error)
    except OSError as error:
        _exit(1, _describe_os_error(error), debug, error)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit with code 143 on SIGTERM. Training catches the signal first, while it has a state to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"vitral: Terminated.\n")  # a print could be inside another one
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare(words: list[str]) -> list[str]:
    """Load what the help needs, and return the words with flags that cyclopts cannot parse in another form."""
    if not words or words[0] in app.help_flags:
        app.resolved_commands()  # the summaries are those of the docstrings
    if not words or words[0] not in app or words[0].startswith("-"):
        return words
    command = app[words[0]]
    function = command.default_command
    assert function is not None
    command.help_epilogue = examples(function.__doc__)
    if words[0] == "train":
        options = {name for argument in command.assemble_argument_collection() for name in argument.names}
        words = ["train", *collect_settings(words[1:], options | {"--help"})]
    return ["/dev/stdin" if word == "-" else word for word in words]  # cyclopts takes a lone hyphen for an option


def collect_settings(words: list[str], options: set[str]) -> list[str]:
    """Return the words with every flag that is not one of the options, such as --ema 0.99, as --set ema=0.99."""
    words, collected = words.copy(), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in options or word == "--":
            collected.append(word)
            continue
        setting = name.removeprefix("--").replace("-", "_")
        if not equals:
            is_value = words and (
                words[0] in ("true", "false", "auto") if setting in SWITCHES else words[0][:2] != "--"
            )
            value = words.pop(0) if is_value else "true"
        collected += ["--set", f"{setting}={value}"]
    return collected


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. On a CPU, torch raises a plain RuntimeError; torch itself is not imported here."""
    is_memory_error = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_memory_error or "allocate memory" in str(error)


def is_lost_process(error: Exception) -> bool:
    """Return whether torch.distributed lost another process, which reports its own failure."""
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    return "/gloo/" in str(error) or type(error).__name__ in names


def describe_lost_process() -> str:
    """Return a message that names the processes that were lost. The first of the others prints it."""
    from vitral.collectives import find_silent
    from vitral.devices import find_world

    silent, world = find_silent(), find_world()
    if silent and world.rank == min({*range(world.size)} - {*silent}, default=0):
        sys.stderr = sys.__stderr__
    if not silent:
        return "Another process of this command ended or stopped responding."
    lost = f"Process {silent[0]}" if len(silent) == 1 else f"Processes {', '.join(map(str, silent))}"
    return f"{lost} ended or stopped responding. Resume the run to continue from its last saved state."


def configure_streams() -> None:
    """Let streams carry any file name, in UTF-8 to and from other programs, and replace a closed standard input."""
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
        _exit(2, "Standard output is closed. Redirect it to a file or to /dev/null.", debug=False, error=None)


def _discard_output() -> None:
    """Send what is still buffered to nowhere, so that Python does not fail to flush it at exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_sentence(error: CycloptsError) -> str:
    """Return cyclopts' message without its line breaks, and where to read on."""
    message = " ".join(str(error).split())
    if isinstance(error, UnusedCliTokensError):
        message = f"Unexpected argument: {' '.join(error.unused_tokens or ())}."
    command = " ".join(["vitral", *(error.command_chain or ())])
    return f"{message} See `{command} --help`."


def _describe_os_error(error: OSError) -> str:
    """Return one sentence. Everything that writes files names the file, so the rest is about standard output."""
    _discard_output()
    reason = error.strerror or error
    return f"{error.filename}: {reason}." if error.filename else f"Cannot write to standard output: {reason}."


def _exit(code: int, message: str, debug: bool, error: Exception | None) -> NoReturn:
    if debug and error is not None:
        raise error
    if sys.stderr is not None:
        print(f"vitral: {chr(10).join(map(printable, message.split(chr(10))))}", file=sys.stderr)
    let_first_print()
    sys.exit(code)
