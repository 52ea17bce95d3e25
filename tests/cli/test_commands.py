"""The commands as a person runs them: results, help, errors and exit codes."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.typed import Done, typed
from vitral.cli.main import COMMANDS, app, is_out_of_memory
from vitral.model.sizes import NAMES

FIXTURES = str(Path(__file__).parents[1] / "fixtures")
NAMES_OF_COMMANDS = [name for commands in COMMANDS.values() for name in commands]


def vitral(*words: str, columns: int = 80) -> Done:
    """Run a command in this process, in a terminal of this width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return typed(*words)


def spawn(*words: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run([sys.executable, "-m", "vitral", *words], capture_output=True, text=True, env=environment)


# ---- models and doctor ----


def test_models_as_a_table() -> None:
    done = vitral("models")
    assert done.returncode == 0
    assert all(name in done.stdout for name in NAMES)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("vit-b16 ")]
    assert "86.6 M" in row
    assert "35.1 G" in row


def test_models_as_json() -> None:
    rows = json.loads(vitral("models", "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(NAMES)
    (row,) = [row for row in rows if row["name"] == "vit-b16"]
    assert row["parameters"] == 86_567_656
    assert row["forward_flops"] == 35_127_656_448
    assert row["image_size"] == [224, 224]
    assert row["training_bytes"] > row["inference_bytes"] > 4 * row["parameters"]


def test_quiet_models_are_names_only() -> None:
    assert vitral("models", "--format", "quiet").stdout.split() == list(NAMES)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["ViT-B/16"], ["vit-b16"]),
        (["hybrid", "l32"], ["r50-vit-l32"]),
        (["small", "nano"], ["vit-nano4", "vit-nano7", "vit-nano8"]),
    ],
)
def test_words_filter_the_models(words: list[str], names: list[str]) -> None:
    assert vitral("models", *words, "--format", "quiet").stdout.split() == names


def test_models_at_another_image_size() -> None:
    (row,) = json.loads(vitral("models", "vit-b16", "--image-size", "384", "--format", "json").stdout)
    assert row["tokens"] == 577
    assert row["forward_flops"] == pytest.approx(111e9, rel=0.01)


def test_models_whose_patch_size_does_not_divide_the_image_size_are_omitted_and_counted() -> None:
    done = vitral("models", "--image-size", "384x256")
    assert done.returncode == 0
    assert "vit-b16 " in done.stdout
    assert "vit-h14" not in done.stdout
    assert "omitted: the patch size does not divide this image size" in done.stdout.replace("\n", " ")


def test_an_image_size_that_fits_no_model_is_an_error_with_the_nearest_size() -> None:
    done = vitral("models", "vit-b16", "--image-size", "225")
    assert done.returncode == 2
    assert "224 x 224" in done.stderr


def test_doctor() -> None:
    done = spawn("doctor")
    assert done.returncode == 0
    assert "torch" in done.stdout
    findings = json.loads(vitral("doctor", "--format", "json").stdout)
    assert findings["device"]["value"] in ("cpu", "cuda", "mps")
    assert findings["device"]["reason"]
    assert findings["packages"]["torch"]
    assert findings["extras"].keys() == {"fast", "serve", "remote", "hub", "photos", "tables", "tensorboard"}
    assert findings["problems"] == []


def test_doctor_shows_and_clears_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", "20GB")
    assert vitral("predict", "vit-cifar10", "missing.png").returncode == 3
    (entry,) = (tmp_path / "verified").iterdir()  # the checksum of the model
    size = {"files": 1, "bytes": entry.stat().st_size}
    cache = json.loads(vitral("doctor", "--format", "json").stdout)["cache"]
    assert cache["folder"] == str(tmp_path)
    assert cache["kinds"]["verified"] == size
    assert (cache["bytes"], cache["limit"]) == (size["bytes"], 20_000_000_000)
    assert "removed" not in cache
    assert f"{tmp_path}: {size['bytes']} B of at most 20.0 GB" in vitral("doctor").stdout
    assert entry.exists()
    page = vitral("doctor", "--clear-cache").stdout
    assert f"verified {size['bytes']} B in 1 file" in page
    assert not entry.exists()
    cleared = json.loads(vitral("doctor", "--clear-cache", "--format", "json").stdout)["cache"]
    assert cleared["removed"]["verified"] == cleared["kinds"]["verified"] == {"files": 0, "bytes": 0}


# ---- help ----


def test_help_groups_the_commands_and_summarizes_each() -> None:
    page = vitral("--help").stdout
    text = " ".join(page.split())
    assert [line for line in page.splitlines() if line in (*COMMANDS, "Options")] == [*COMMANDS, "Options"]
    for name in NAMES_OF_COMMANDS:
        function = app[name].default_command
        assert function is not None
        summary, *_ = str(function.__doc__).split("\n")
        assert f"\n  {name:<12}{summary[:40]}" in page
        assert f"{name} {summary}" in text


@pytest.mark.parametrize("name", NAMES_OF_COMMANDS)
def test_every_help_page_is_complete(name: str) -> None:
    """The docstring, the arguments as the usage names them, examples, and no placeholder of a Python type."""
    done = typed(name, "--help")
    page = done.stdout
    assert done.returncode == 0
    function = app[name].default_command
    assert function is not None
    first, *_ = str(function.__doc__).split("\n")
    assert first in page
    assert first.split()[0].isalpha()
    assert first.endswith(".")
    usage, *_ = page.split("\n")
    section = page.partition("\nArguments\n")[2].partition("\n\n")[0]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            assert parameter.name.upper() in usage
            assert f"  {parameter.name.upper()} " in section
    examples = page.partition("\nExamples\n")[2].strip().splitlines()
    assert len(examples) >= 2
    assert all(f"vitral {name}" in example and len(example) < 80 for example in examples)
    options = page.partition("\nOptions\n")[2].partition("\nExamples\n")[0]
    assert not re.search(r" (STR|INT|FLOAT|PATH|CHOICE)\b|default: (False|True|None)", options)


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", ["", "train", "evaluate"])
def test_help_fits_the_terminal(name: str, columns: int) -> None:
    lines = spawn(*name.split(), "--help", columns=columns).stdout.splitlines()
    usage = next(number for number, line in enumerate(lines) if not line)
    assert all(len(line.rstrip()) <= columns for line in lines[usage:])


def test_help_and_version() -> None:
    assert spawn("--version").stdout.strip() == __import__("vitral").__version__
    assert spawn().stdout == spawn("--help").stdout == vitral("--help").stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["runs"]])
def test_help_and_lists_are_fast(words: list[str]) -> None:
    """Under 0.5 s of processor time, the best of several: other tests share the machine."""
    resource = pytest.importorskip("resource", reason="needs POSIX")
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert spawn(*words).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"{min(seconds):.2f} s")


@pytest.mark.parametrize(
    "statement",
    [
        "import vitral",
        "import vitral; vitral.ViTConfig, vitral.VitralError",
        "from vitral.cli.main import main; main(['--help'])",
        "from vitral.cli.main import main; main(['train', '--help'])",
        "from vitral.cli.main import main; main(['models'])",
        f"from vitral.cli.main import main; main(['runs', {FIXTURES!r}])",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(statement: str) -> None:
    script = f"{statement}\nimport sys; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


# ---- errors ----


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["model"], 'Did you mean "models"?'),
        (["models", "--fromat", "json"], "Did you mean --format?"),
        (["models", "--format", "jsn"], "json"),
        (["models", "vit-b1x"], "'vit-b1x'. Did you mean 'vit-b16'?"),
        (["models", "--image-size", "many"], "--image-size: 'many' is not an image size"),
        (["models", "--image-size=-5"], "--image-size: '-5'"),
        (["models", "vit-b", "vit-s"], "'vit-b' 'vit-s'"),
        (["models", "--image-size", "1" * 5000], "is not an image size"),
        (["doctor", "extra"], "Unexpected argument: extra. See `vitral doctor --help`."),
        (["train", "builtin:digits", "--steps", str(2**63)], f"--steps must be an integer of at most {2**63 - 1}"),
        (["train", "builtin:digits", "--steps", str(2**63)], f"(got {2**63})"),
        (["train", "builtin:digits", "--batch-size", "1e3"], "--batch-size must be an integer of at most"),
        (["train", "builtin:digits", "--batch-size", "1e3"], "(got '1e3')"),
        (["evaluate", "vit-cifar10", "photos", "--batch-size", str(2**63)], f"(got {2**63})"),
        (["predict", "vit-cifar10", "photo.jpg", "--top", "2.5"], "--top must be an integer"),
        (["train", "--resume", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_a_usage_error_is_one_sentence_and_exit_code_2(words: list[str], fact: str) -> None:
    done = vitral(*words)
    assert done.returncode == 2
    assert fact in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_an_interruption_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitral.cli.doctor.examine", interrupt)
    done = typed("doctor")
    assert (done.returncode, done.stderr) == (130, "vitral: Interrupted.\n")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_out_of_memory_is_an_error_with_a_fix(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    assert is_out_of_memory(error)
    monkeypatch.setattr("vitral.cli.doctor.examine", fail)
    done = typed("doctor")
    assert done.returncode == 1
    assert done.stderr == "vitral: Out of memory. Reduce --batch-size, --image-size or the model.\n"


def test_other_runtime_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("vitral.cli.doctor.examine", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        typed("doctor")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("words", ["--help", "models", "models --format json", "doctor"])
def test_a_closed_pipe_is_not_an_error(words: str) -> None:
    command = f"set -o pipefail; '{sys.executable}' -m vitral {words} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("words", ["models", "models --format json", "models vit-b16 --format quiet"])
def test_a_full_disk_is_one_sentence_that_names_the_target(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "vitral", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "vitral: Cannot write to standard output: No space left on device."


@pytest.mark.parametrize("columns", [0, 20])
def test_a_narrow_terminal_keeps_all_numbers(columns: int) -> None:
    assert "35.1 G" in vitral("models", "b16", columns=columns).stdout


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" not in spawn("models", "nonsense").stderr
    assert "Traceback" in spawn("models", "nonsense", "--debug").stderr
