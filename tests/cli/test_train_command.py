"""``vitral train`` as a person types it; runs themselves are in tests/train and tests/faults."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.typed import typed as run
from tests.data.pictures import class_folders
from vitral.cli.train import SWITCHES
from vitral.training.config import setting_names

TINY = (
    "--model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --image-size 16 --batch-size 8 --epochs 1"
)


def test_help_is_quick_and_short_and_help_all_is_long() -> None:
    program = "import sys; sys.argv = ['vitral', 'train', '--help']\nfrom vitral.cli.main import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", program + "\nassert 'torch' not in sys.modules"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--optim.lr" not in done.stdout.replace("such as --optim.lr", "")
    everything = run("train", "--help-all").stdout
    for name in ("--optim.lr", "--augment.flip", "--tune.rank", "--save-seconds", "--network.FIELD", "paper-jft"):
        assert name in everything


def test_print_config_is_a_file_that_can_be_used(tmp_path: Path) -> None:
    done = run("train", "builtin:digits", "--recipe", "small", "--optim.lr", "0.5", "--compile", "--print-config")
    assert done.returncode == 0, done.stderr
    told = tomllib.loads(done.stdout)
    assert told["optim"]["lr"] == 0.5
    assert told["optim"]["name"] == "muon"
    assert told["compile"] is True
    assert "# Learning rate at its peak." in done.stdout
    (tmp_path / "mine.toml").write_text(done.stdout)
    again = run("train", "builtin:digits", "--config", str(tmp_path / "mine.toml"), "--optim.lr=0.25", "--print-config")
    assert tomllib.loads(again.stdout)["optim"]["lr"] == 0.25


def test_a_switch_takes_no_word_that_is_not_its_own() -> None:
    told = [
        run("train", *words.split(), "--print-config").stdout
        for words in ("--gradient-checkpointing builtin:digits", "builtin:digits --gradient-checkpointing true")
    ]
    assert told[0] == told[1]
    assert tomllib.loads(told[0])["gradient_checkpointing"] is True
    off = run("train", "--gradient-checkpointing", "false", "builtin:digits", "--print-config").stdout
    assert tomllib.loads(off)["gradient_checkpointing"] is False
    assert {name for name, kind in setting_names().items() if kind is bool} == SWITCHES


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "no data"),
        ("nowhere", "no folder"),
        ("builtin:digits --optim.lrr 1", "Did you mean 'optim.lr'"),
        ("builtin:digits --optim.lr fast", "must be a number"),
        ("builtin:digits --epochs -1", "epochs"),
        ("builtin:digits --recipe smal", "Did you mean 'small'"),
        ("builtin:digits --model vit-x99", "vit-x99"),
        ("builtin:digits --from nothing.npz", "nothing.npz"),
        ("builtin:digits --image-size 30", "image_size=30"),
        ("builtin:digits --config nothing.toml", "nothing.toml"),
        ("builtin:digits --network.wisdom 3", "wisdom"),
        ("builtin:digits --device tpu", "tpu"),
        ("builtin:digits --device cpu:abc", "device='cpu:abc' must be one of"),
        ("builtin:digits --epochs nan", "finite"),
        ("builtin:digits --minutes nan", "finite"),
        ("builtin:digits --seed 99999999999999999999", "at most 2147483648"),
        ("builtin:digits --seed -1", "at least 0"),
        ("builtin:digits --optim.betas 2,3", "optim.betas=(2.0, 3.0) must be at least 0 and below 1"),
        ("builtin:digits --network.num_classes 5", "that of the data"),
        ("builtin:digits --network.pool none", "every token"),
        ("builtin:digits --image-size 70000", "at most 16384"),
        ("builtin:digits --set foo", "--set foo must be NAME=VALUE"),
        ("builtin:digits --from=", "from='' names nothing"),
        ("builtin:digits --tune.what last-blocks --tune.blocks 100", "the network's 4 blocks"),
        ("--resume nowhere", "no run"),
    ],
)
def test_wrong_words_are_one_sentence(words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("train", *words.split())
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_print_config_of_a_run_goes_on_with_nothing(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 20, "b": 20}, size=(16, 16))
    done = run("train", str(data), "--out", str(tmp_path / "one"), *TINY.split(), "--format", "quiet")
    assert done.returncode == 0, done.stderr
    (tmp_path / "one" / "report.json").unlink()
    done = run("train", "--resume", str(tmp_path / "one"), "--print-config")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "one" / "config.toml").read_text()
    assert not (tmp_path / "one" / "report.json").exists()
    done = run("train", "--resume", str(tmp_path / "one"), "--recipe", "small")
    assert done.returncode == 2
    assert "Leave --recipe, --config and --out out" in done.stderr


def test_a_run_in_json_and_quietly(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 20, "b": 20}, size=(16, 16))
    done = run("train", str(data), "--out", str(tmp_path / "one"), *TINY.split(), "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 <= result["test"]["top1"] <= 1
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"decided", "began", "stepped", "epochended", "saved", "finished"} <= {event["event"] for event in events}
    quiet = run("train", str(data), "--out", str(tmp_path / "two"), *TINY.split(), "--format", "quiet")
    assert float(quiet.stdout) == pytest.approx(result["test"]["top1"], abs=1e-4)
    described = json.loads(run("describe", str(tmp_path / "one"), "--format", "json").stdout)
    assert described["labels"] == ["a", "b"]
