"""The public names: complete, visible to type checkers, and working after every submodule is imported."""

import ast
import inspect
import pickle
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_config
from tests.data.images import class_folders
from vitral import api
from vitral.training.events import Event, Finished, Interrupted, Started

TINY: dict[str, Any] = dict(
    model="vit-pico4", network=dict(width=48, depth=1, heads=3), image_size=16, batch_size=8, steps=2, device="cpu"
)


STUDY = """
title = "Tiny"

[base]
steps = 1
batch_size = 8
image_size = 16
network = {width = 48, depth = 1, heads = 3}

[[cells]]
name = "only"
"""
SUITE: dict[str, Any] = dict(steps=1, image_size=16, batch_size=8, device="cpu")


def make_task(folder: Path) -> Path:
    """Write a stand-in for one task of VTAB-1k."""
    for split in ("train", "test"):
        class_folders(folder / "svhn", {str(digit): 4 for digit in range(10)}, size=(16, 16), split=split)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    for split in ("train", "test"):
        class_folders(folder, {"red": 20, "green": 20}, size=(16, 16), split=split)
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> vitral.Run:
    return vitral.train(photos, out=tmp_path_factory.mktemp("runs") / "run", progress=False, **TINY)


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """Every module of the package, imported."""
    names = [module.name for module in pkgutil.walk_packages(vitral.__path__, "vitral.")]
    return {name: import_module(name) for name in names if name != "vitral.__main__"}


def test_all_is_sorted_complete_and_resolves() -> None:
    assert vitral.__all__ == sorted(vitral.__all__)
    assert set(vitral.__all__) <= set(dir(vitral))
    for name in vitral.__all__:
        assert getattr(vitral, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(vitral))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    assert seen == vitral._MODULE_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'trian'"):
        vitral.trian  # noqa: B018


def test_no_module_shares_its_name_with_a_public_name(modules: dict[str, ModuleType]) -> None:
    top_level = {name.split(".")[1] for name in modules}
    assert not top_level & set(vitral.__all__)
    for name in set(vitral.__all__) - {"__version__"}:
        value = getattr(vitral, name)
        assert inspect.isfunction(value) or inspect.isclass(value), name
    assert not [name for name, module in modules.items() if callable(module)]


def test_names_still_resolve_in_a_process_that_imported_every_module_first() -> None:
    program = """
import importlib, pkgutil, vitral
for module in pkgutil.walk_packages(vitral.__path__, "vitral."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert all(callable(getattr(vitral, name)) for name in vitral.__all__ if name != "__version__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_function_works(
    modules: dict[str, ModuleType], run: vitral.Run, photos: Path, tmp_path: Path
) -> None:
    """Call each function on something tiny, after every submodule was imported."""
    network = vitral.ViT(small_config())
    study = tmp_path / "tiny.toml"
    study.write_text(STUDY)
    calls: dict[str, tuple[Callable[[], object], type]] = {
        "convert": (lambda: vitral.convert(run.folder, tmp_path / "timm.safetensors", to="timm"), object),
        "create": (lambda: vitral.create("vit-pico4", num_classes=2), vitral.ViT),
        "describe": (lambda: vitral.describe(run.folder), object),
        "evaluate": (lambda: vitral.evaluate(run.folder, photos, device="cpu"), vitral.Evaluation),
        "export": (lambda: vitral.export(run.folder, tmp_path / "run.pt2", to="pt2"), object),
        "inspect": (lambda: vitral.inspect(run.folder, photos, out=tmp_path / "inside"), object),
        "load": (lambda: vitral.load(run.folder / "model.safetensors"), vitral.Checkpoint),
        "plan": (lambda: vitral.plan("vit-s16", images=1000, epochs=2), object),
        "record_attention": (lambda: vitral.record_attention(network).__enter__(), object),
        "run_study": (lambda: vitral.run_study(study, photos, out=tmp_path / "study", jobs=1), object),
        "run_suite": (lambda: vitral.run_suite(run.folder, make_task(tmp_path / "tasks"), **SUITE), object),
        "save": (lambda: vitral.save(vitral.load(run.folder), tmp_path / "copy.safetensors"), object),
        "scan": (lambda: vitral.scan(photos), object),
        "train": (lambda: vitral.train(photos, out=tmp_path / "run", progress=False, **TINY), vitral.Run),
        "train_events": (lambda: [*vitral.train_events(photos, out=tmp_path / "events", **TINY)], list),
        "write_report": (lambda: vitral.write_report(run.folder), Path),
    }
    functions = {name for name in vitral.__all__ if inspect.isfunction(getattr(vitral, name))}
    functions -= {"serve"}  # which returns when the process is interrupted: tests/serving
    assert set(calls) == functions
    for name, (call, kind) in calls.items():
        result = call()
        assert isinstance(result, kind), name
        assert not isinstance(result, Iterator), f"{name} returned an iterator, which does nothing until it is read"


def test_train_blocks_and_returns_the_finished_run(run: vitral.Run) -> None:
    assert isinstance(run, vitral.Run)
    assert run.folder.is_dir()
    assert 0 <= run.test.top1 <= 1
    assert run.test.images == 40
    assert run.report.name == "report.html"
    assert run.report.is_file()
    checkpoint = run.checkpoint()
    assert isinstance(checkpoint, vitral.Checkpoint)
    assert checkpoint.labels == ("green", "red")


def test_train_shows_progress_on_standard_error(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vitral.train(photos, out=tmp_path / "loud", **TINY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "epoch" in err
    vitral.train(photos, out=tmp_path / "silent", progress=False, **TINY)
    assert capfd.readouterr() == ("", "")


def test_train_names_map_to_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed: dict[str, Any] = {}

    def record(data: object, **settings: Any) -> Iterator[Event]:
        passed.update(settings, data=data)
        return iter([Finished(folder=tmp_path, test={"top1": 1.0}, best_step=1, train_seconds=1.0)])

    monkeypatch.setattr("vitral.training.entry.train_events", record)
    monkeypatch.setattr(api, "write_report", lambda folder: None)
    (tmp_path / "config.toml").write_text("")
    vitral.train("photos", from_="a.npz", lr=1e-3, tune="lora", optim=dict(eps=1e-6), progress=False)
    assert passed == {
        "data": "photos", "from": "a.npz", "optim.lr": 1e-3, "tune.what": "lora", "optim": {"eps": 1e-6}
    }  # fmt: skip
    passed.clear()
    [*vitral.train_events("photos", tune=dict(what="lora", rank=4), val=tmp_path)]
    assert passed == {"data": "photos", "tune": {"what": "lora", "rank": 4}, "val": tmp_path}


def test_train_starts_from_a_checkpoint_and_trains_your_own_network(
    run: vitral.Run, photos: Path, tmp_path: Path
) -> None:
    options = {name: value for name, value in TINY.items() if name not in ("model", "network", "image_size")}
    tuned = vitral.train(
        photos, from_=run.folder, lr=1e-3, tune="head", out=tmp_path / "tuned", progress=False, **options
    )
    settings = tuned.read_config()
    assert settings["from"] == str(run.folder)
    assert settings["optim"]["lr"] == 1e-3
    assert settings["tune"]["what"] == "head"
    network = vitral.ViT(small_config(num_classes=2, channels=3))
    mine = vitral.train(photos, model=network, out=tmp_path / "mine", progress=False, **options)
    weights = mine.checkpoint().model.state_dict()
    assert set(weights) == set(network.state_dict())
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (dict(epochs=1, steps=2), "epochs"),
        (dict(optimm=dict(lr=1)), "optimm"),
        (dict(lr="fast"), "optim.lr"),
        (dict(recipe="smal"), "small"),
        (dict(progress=False), "progress"),
    ],
)
def test_wrong_options_raise_before_anything_is_trained(options: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError, match=fact):
        vitral.train_events("builtin:digits", out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_raises_after_printing_how_to_resume(
    number: int,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    events = [
        Started(folder=tmp_path, step=0, steps=9, steps_per_epoch=3, parameters=1, trained=1),
        Interrupted(step=4, resume="vitral train --resume somewhere", signal=number),
    ]
    monkeypatch.setattr("vitral.training.entry.train_events", lambda data, **settings: iter(events))
    with pytest.raises(error) as caught:
        vitral.train("photos")
    assert "vitral train --resume somewhere" in capfd.readouterr().err
    if error is SystemExit:
        assert caught.value.args == (143,)


def test_train_events_has_the_signature_of_train() -> None:
    options = {**inspect.signature(vitral.train).parameters}
    del options["progress"]
    assert {**inspect.signature(vitral.train_events).parameters} == options
    assert set(options) >= {"from_", "minutes", "lr", "tune", "precision", "workers", "resume", "settings"}


def test_every_error_is_a_vitral_error() -> None:
    errors = [getattr(vitral, name) for name in vitral.__all__ if name.endswith("Error")]
    assert len(errors) == 5
    assert all(issubclass(error, vitral.VitralError) for error in errors)
    error = vitral.ConfigError("heads=7 does not divide width=768.", hint="Use heads=8.")
    assert str(error) == "heads=7 does not divide width=768. Use heads=8."
    assert error.hint == "Use heads=8."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # workers raise them, too
