"""The command `vitral train`: options, settings, formats and errors. Training itself is in tests/training."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.typed import typed as run
from tests.data.images import class_folders
from vitral.cli.main import SWITCHES
from vitral.cli.train import RECIPES
from vitral.training.settings import recipe_names, setting_names

TINY = (
    "--model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --image-size 16 --batch-size 8 --epochs 1"
)


def test_help_has_the_main_options_and_help_all_has_every_setting() -> None:
    page = run("train", "--help").stdout
    for option in (
        "--from MODEL",
        "--tune WHAT",
        "--optim.lr LR",
        "--precision",
        "--workers N",
        "--val DATA",
        "--config",
    ):
        assert option in page
    assert "Usage: vitral train DATA" in page
    assert "--ema " not in page.partition("\nOptions\n")[2].replace("such as --ema", "")
    everything = run("train", "--help-all").stdout
    for name in ("--optim.lr", "--augment.flip", "--tune.rank", "--save-seconds", "--network.FIELD", "paper-jft"):
        assert name in everything
    assert all(len(line) <= 80 for line in everything.splitlines())


def test_help_names_every_recipe() -> None:
    assert set(RECIPES.split(", ")) == set(recipe_names())


def test_print_config_is_a_file_that_works_as_config(tmp_path: Path) -> None:
    done = run("train", "builtin:digits", "--recipe", "small", "--optim.lr", "0.5", "--compile", "--print-config")
    assert done.returncode == 0, done.stderr
    settings = tomllib.loads(done.stdout)
    assert settings["optim"]["lr"] == 0.5
    assert settings["optim"]["name"] == "muon"
    assert settings["compile"] is True
    assert "\n# " in done.stdout
    (tmp_path / "mine.toml").write_text(done.stdout)
    again = run("train", "builtin:digits", "--config", str(tmp_path / "mine.toml"), "--optim.lr=0.25", "--print-config")
    assert tomllib.loads(again.stdout)["optim"]["lr"] == 0.25


def test_tune_is_the_short_form_of_tune_what() -> None:
    pages = [
        run("train", "builtin:digits", "--from", "vit-cifar10", *words.split(), "--print-config").stdout
        for words in ("--tune lora", "--tune.what lora", "--set tune.what=lora")
    ]
    assert tomllib.loads(pages[0])["tune"]["what"] == "lora"
    assert pages == [pages[0]] * 3


def test_flags_override_each_other_by_any_spelling() -> None:
    done = run("train", "builtin:digits", "--workers", "2", "--precision", "bfloat16", "--ema=0.5", "--print-config")
    settings = tomllib.loads(done.stdout)
    assert (settings["workers"], settings["precision"], settings["ema"]) == (2, "bfloat16", 0.5)


def test_a_switch_takes_only_true_or_false_as_its_value() -> None:
    pages = [
        run("train", *words.split(), "--print-config").stdout
        for words in ("--gradient-checkpointing builtin:digits", "builtin:digits --gradient-checkpointing true")
    ]
    assert pages[0] == pages[1]
    assert tomllib.loads(pages[0])["gradient_checkpointing"] is True
    off = run("train", "--gradient-checkpointing", "false", "builtin:digits", "--print-config").stdout
    assert tomllib.loads(off)["gradient_checkpointing"] is False
    assert {name for name, kind in setting_names().items() if kind is bool} | {"compile"} == SWITCHES


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("", "DATA is missing"),
        ("nowhere", "nowhere not found"),
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
        ("builtin:digits --device cpu:abc", "'cpu:abc'"),
        ("builtin:digits --epochs nan", "finite"),
        ("builtin:digits --minutes nan", "finite"),
        ("builtin:digits --seed 99999999999999999999", "99999999999999999999"),
        ("builtin:digits --seed -1", "got -1"),
        ("builtin:digits --optim.betas 2,3", "optim.betas must be"),
        ("builtin:digits --network.num_classes 5", "network.num_classes=5"),
        ("builtin:digits --network.pool none", "network.pool=none"),
        ("builtin:digits --image-size 70000", "got 70000"),
        ("builtin:digits --set foo", "--set must be NAME=VALUE (got 'foo')"),
        ("builtin:digits --from=", "from=''"),
        ("builtin:digits --tune.what last-blocks --tune.blocks 100", "tune.blocks must be an integer from 1 to 4"),
        ("--resume nowhere", "nowhere is not a run folder"),
    ],
)
def test_a_wrong_option_is_one_sentence(words: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("train", *words.split())
    assert done.returncode == 2, done.stderr
    *choices, error = done.stderr.strip().splitlines()
    assert error.startswith("vitral: ")
    assert fact in error
    assert not any(line.startswith("vitral: ") for line in choices)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_print_config_with_resume_trains_nothing(tmp_path: Path) -> None:
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
    assert "--recipe" in done.stderr


def test_a_run_prints_json_or_only_its_score(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 20, "b": 20}, size=(16, 16))
    done = run("train", str(data), "--out", str(tmp_path / "one"), *TINY.split(), "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 <= result["test"]["top1"] <= 1
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"chosen", "started", "stepped", "epochended", "saved", "finished"} <= {event["event"] for event in events}
    quiet = run("train", str(data), "--out", str(tmp_path / "two"), *TINY.split(), "--format", "quiet")
    assert float(quiet.stdout) == pytest.approx(result["test"]["top1"], abs=1e-4)
    described = json.loads(run("describe", str(tmp_path / "one"), "--format", "json").stdout)
    assert described["labels"] == ["a", "b"]
