"""From arguments to a request for a run, and the settings of an existing run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.data.images import class_folders
from tests.training.short_runs import TINY, train
from vitral.runs import Run
from vitral.training.config import ResolvedConfig
from vitral.training.events import Finished
from vitral.training.request import collect_settings, read_run_settings, reopen
from vitral.training.settings import as_toml, read_toml, recipe_path

SHORT: dict[str, Any] = {**TINY, "model": "ViT-pico4", "epochs": "auto", "steps": 7, "network": dict(depth=1)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24}, size=(16, 16))


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    assert isinstance(train(photos, run, **SHORT)[-1], Finished)
    return run


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """A run that can be resumed."""
    shutil.copytree(finished, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "report.json").unlink()
    return tmp_path / "unfinished"


# ---- a new run ----


def test_the_latest_layer_states_the_length() -> None:
    def length(**settings: object) -> tuple[object, object, object]:
        config = collect_settings("builtin:digits", settings, recipe="digits").config
        return config.steps, config.epochs, config.minutes

    assert length() == (read_toml(recipe_path("digits"))["steps"], "auto", None)
    assert length(epochs=3) == (None, 3.0, None)
    assert length(minutes=5) == (None, "auto", 5.0)
    assert length(steps=7) == (7, "auto", None)
    with pytest.raises(vitral.ConfigError, match="epochs and minutes both"):
        length(epochs=3, minutes=5)


def test_a_file_may_state_one_length(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("steps = 3\nepochs = 2\n")
    with pytest.raises(vitral.ConfigError, match="steps and epochs both"):
        collect_settings("x", {}, recipe="none", config=tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text("resume = 3\n")
    with pytest.raises(vitral.ConfigError, match="no setting 'resume'"):
        collect_settings("x", {}, recipe="none", config=tmp_path / "x.toml")


def test_layers(tmp_path: Path) -> None:
    """Defaults < recipe < config file < arguments."""
    (tmp_path / "x.toml").write_text('data = "builtin:digits"\nseed = 3\nema = 0.5\n')
    request = collect_settings(None, {"ema": 0.25}, recipe="digits", config=tmp_path / "x.toml")
    assert (request.config.data, request.config.seed, request.config.ema) == ("builtin:digits", 3, 0.25)
    assert request.config.steps == read_toml(recipe_path("digits"))["steps"]
    assert request.choices == ()
    with pytest.raises(vitral.ConfigError, match="DATA is missing"):
        collect_settings(None, {}, recipe="digits")


def test_the_recipe_is_chosen_by_checkpoint_and_size(photos: Path, tmp_path: Path) -> None:
    large = class_folders(tmp_path / "large", {"a": 2, "b": 2}, size=(120, 100))
    chosen = {
        "finetune": collect_settings(photos, {"from": "x.safetensors"}),
        "small": collect_settings(photos, {}),
        "photos": collect_settings(large, {}),
    }
    for name, request in chosen.items():
        (choice,) = request.choices
        assert (choice.name, choice.value) == ("recipe", name)
        assert choice.reason
        assert (request.dataset is None) == (name == "finetune")  # opened once, and kept
        assert (request.headers is None) == (name == "finetune")
    assert "100 pixels" in chosen["photos"].choices[0].reason
    assert collect_settings(photos, {}, recipe="none").choices == ()


def test_a_misspelled_model_is_refused_before_the_dataset_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('model = "vit-nona7"\n')
    for settings, file in (({"model": "vit-nona7"}, None), ({}, tmp_path / "x.toml")):
        with pytest.raises(vitral.ConfigError, match="no model named 'vit-nona7'.*'vit-nano7'"):
            collect_settings(tmp_path / "missing", settings, config=file)


@pytest.mark.parametrize("name", ["bit-r50x1", "R50x1", "BiT-M-R101x3"])
def test_a_recipe_for_vits_keeps_its_network_fields_from_a_bit(name: str) -> None:
    assert collect_settings("builtin:digits", {"model": name}, recipe="small").config.network == {}
    assert collect_settings("builtin:digits", {"model": "vit-pico7"}, recipe="small").config.network == {"pool": "mean"}


def test_a_network_needs_a_config() -> None:
    import torch

    with pytest.raises(vitral.ConfigError, match="model=Linear .*ViTConfig"):
        collect_settings("builtin:digits", {"model": torch.nn.Linear(2, 2)}, recipe="none")
    network = vitral.create("vit-pico7", num_classes=10)
    request = collect_settings("builtin:digits", {"model": network}, recipe="none")
    assert request.network is network
    assert request.config.model == "custom:ViT"


# ---- an existing run ----


def values_of(config: ResolvedConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ResolvedConfig.__dataclass_fields__}


@pytest.mark.parametrize("length", [{"steps": 20}, {"minutes": 5.0}])
def test_a_resume_reads_both_lengths(unfinished: Path, length: dict[str, Any]) -> None:
    run = Run(unfinished)
    config = ResolvedConfig(**{**values_of(read_run_settings(run)), "steps": None, "epochs": 3.125, **length})
    run.write_config(as_toml(config))
    assert read_run_settings(run) == config
    assert reopen(unfinished, None, length)[1] == config
    with pytest.raises(vitral.ConfigError, match=f"{next(iter(length))}=.*got 6"):
        reopen(unfinished, None, dict.fromkeys(length, 6))


def test_a_file_of_a_run_starts_another_one_with_one_length(unfinished: Path, photos: Path) -> None:
    run = Run(unfinished)
    config = ResolvedConfig(**{**values_of(read_run_settings(run)), "steps": None, "epochs": 3.125, "minutes": 5.0})
    run.write_config(as_toml(config))
    again = collect_settings(photos, {}, recipe="none", config=run.config).config
    assert (again.epochs, again.steps, again.minutes) == (3.125, None, None)


def test_repeated_settings_may_be_spelled_differently(
    unfinished: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    for data in (photos, f"{photos}/", photos.name, f"{photos.name}/../{photos.name}"):
        reopen(unfinished, data, {})
    same = ({"model": "vit-pico4"}, {"device": "auto"}, {"optim.lr": "auto"}, {"device": "cpu:0"}, {"steps": 7})
    for settings in same:
        reopen(unfinished, None, settings)
    other = ({"model": "vit-pico7"}, {"optim.lr": 0.5}, {"val": "photos"}, {"data": "elsewhere"}, {"steps": 8})
    for settings in other:
        ((name, value),) = settings.items()
        with pytest.raises(vitral.ConfigError, match=f"{name}=.*--resume got {value!r}.*another --out"):
            reopen(unfinished, None, settings)


@pytest.mark.parametrize("argument", [{"recipe": "small"}, {"config": "x.toml"}, {"out": "elsewhere"}])
def test_a_resumed_run_takes_no_other_recipe_file_or_folder(unfinished: Path, argument: dict[str, Any]) -> None:
    reopen(unfinished, None, {}, out=unfinished)
    with pytest.raises(vitral.ConfigError, match=r"Drop --recipe, --config and --out"):
        reopen(unfinished, None, {}, **argument)


@pytest.mark.parametrize("name", ["image_size", "channels", "lr", "batch_size", "workers", "device", "epochs", "what"])
def test_a_config_that_lost_a_line(unfinished: Path, name: str) -> None:
    lines = (unfinished / "config.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{name} =")]
    assert len(kept) < len(lines)
    (unfinished / "config.toml").write_text("\n".join(kept))
    with pytest.raises(vitral.ConfigError, match=rf"config\.toml is damaged: .*{name}"):
        reopen(unfinished, None, {})


@pytest.mark.parametrize("size", [0, 1, 100, 300, 700, 1500])
def test_a_config_that_was_cut(unfinished: Path, size: int) -> None:
    (unfinished / "config.toml").write_bytes((unfinished / "config.toml").read_bytes()[:size])
    with pytest.raises(vitral.ConfigError, match=r"config\.toml") as caught:
        reopen(unfinished, None, {})
    assert "__init__" not in str(caught.value)
