"""The linear probe of a fine-tuning: its features, its head, and a run that never falls below it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders
from tests.training.short_runs import TINY, assert_same_run, interrupt_at, last
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.errors import ConfigError, DataError
from vitral.inference.loaded_model import load_model
from vitral.inference.novelty import Novelty
from vitral.inference.pipeline import make_loader, run_model
from vitral.model.config import ViTConfig
from vitral.model.vit import ViT
from vitral.training.entry import train_events
from vitral.training.events import Candidate, Chosen, EpochEnded, Event, Finished, Measuring, Started, Stepped
from vitral.training.probe import measuring, with_pool

SETTINGS: dict[str, Any] = {name: TINY[name] for name in ("batch_size", "workers", "device")}


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("colors"), {"red": 30, "green": 30, "blue": 30}, size=(16, 16))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    vitral.save(small_model(), path)
    return path


def train(data: Path, checkpoint: Path, out: Path, **settings: Any) -> list[Event]:
    if isinstance(settings.get("tune"), str):
        settings["tune"] = {"what": settings["tune"]}
    return list(train_events(data, out=out, **{"from": str(checkpoint), **SETTINGS, **settings}))


def candidates_of(events: list[Event]) -> list[Candidate]:
    return [event for event in events if isinstance(event, Candidate)]


@pytest.mark.parametrize("minutes", [None, 1])
def test_a_probe_is_chosen_once_and_before_it_is_fitted(
    checkpoint: Path, tmp_path: Path, minutes: float | None
) -> None:
    few = class_folders(tmp_path / "few", {"red": 2, "green": 2})
    events = train(few, checkpoint, tmp_path / "run", minutes=minutes)
    names = [event.name for event in events if isinstance(event, Chosen)]
    assert names.count("tune.what") == 1
    assert not {"optim.lr", "optim.warmup_steps"} & set(names)  # nothing is trained
    (chosen,) = (
        number for number, event in enumerate(events) if isinstance(event, Chosen) and event.name == "tune.what"
    )
    assert chosen < min(number for number, event in enumerate(events) if isinstance(event, Candidate))


def test_a_probe_is_a_complete_model(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    events = train(colors, checkpoint, tmp_path / "run", tune="probe")
    assert last(events, Started).steps == 0
    tried = candidates_of(events)
    pools = ("class token", "mean of patches", "class token and mean")
    *discriminants, logistic, average = (candidate.name for candidate in tried)
    assert discriminants == [f"probe ({pool}, discriminant)" for pool in pools]
    assert logistic in [f"probe ({pool}, logistic regression)" for pool in pools]
    assert average == logistic.replace("logistic regression", "average of both")
    assert [candidate.chosen for candidate in tried].count(True) == 1
    splits = choose_splits(open_dataset(colors))
    images = len(splits.train) + len(splits.validation)  # nothing is held out of the final model but the test images
    assert all(candidate.evidence == f"cross-validation on {images} images" for candidate in tried)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test"]["top1"] == last(events, Finished).test["top1"] > 0.9  # the mean color is in any feature
    assert [candidate["name"] for candidate in report["candidates"]] == [candidate.name for candidate in tried]
    assert vitral.evaluate(tmp_path / "run").scores.top1 == report["test"]["top1"]


def test_the_frozen_weights_are_those_of_the_checkpoint(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    train(colors, checkpoint, tmp_path / "run", tune="probe")
    base, probed = vitral.load(checkpoint).model.state_dict(), vitral.load(tmp_path / "run").model.state_dict()
    for name in base.keys() & probed.keys():
        if not name.startswith("head."):
            assert torch.equal(base[name], probed[name]), name


def test_not_below_scikit_learn(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    train(colors, checkpoint, tmp_path / "run", tune="probe", augment=dict(flip=0.0, crop="none"))
    dataset = open_dataset(colors)
    splits = choose_splits(dataset)
    model = load_model(tmp_path / "run", device="cpu")

    def features(items: Any) -> Any:
        outputs = measuring(run_model(make_loader(model, items), model.features), "features")
        while True:
            try:
                next(outputs)
            except StopIteration as end:
                return end.value

    fitted, held_out = features((*splits.train, *splits.validation)), features(splits.test)
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": [1e-3, 1e-1, 10.0, 1e3]})
    reference = search.fit(fitted.outputs.numpy(), fitted.labels.numpy())
    theirs = (reference.predict(held_out.outputs.numpy()) == held_out.labels.numpy()).mean()
    ours = json.loads((tmp_path / "run" / "report.json").read_text())["test"]["top1"]
    assert ours >= theirs - 0.1  # 18 test images: within two of them


@pytest.mark.parametrize("what", ["head", "last-blocks", "lora", "all"])
def test_training_never_falls_below_the_probe(colors: Path, checkpoint: Path, tmp_path: Path, what: str) -> None:
    """A learning rate that destroys every weight leaves the probe."""
    events = train(colors, checkpoint, tmp_path / "run", tune=what, steps=12, optim=dict(lr=5.0, clip=0.0))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    tried = {candidate["name"]: candidate for candidate in report["candidates"]}
    assert {"probe", f"{what}, half-way", what} <= set(tried)
    (chosen,) = [candidate for candidate in tried.values() if candidate["chosen"]]
    assert chosen["top1"] >= tried["probe"]["top1"]
    assert vitral.evaluate(tmp_path / "run").scores.top1 > 0.9
    assert [event for event in events if isinstance(event, EpochEnded)]


def test_training_starts_at_the_probe(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    events = train(colors, checkpoint, tmp_path / "run", tune="last-blocks", epochs=1, optim=dict(lr=1e-9))
    probe = next(event for event in candidates_of(events) if event.name == "probe")
    epoch = last(events, EpochEnded)
    assert epoch.top1 == probe.top1
    assert epoch.loss == pytest.approx(probe.loss, rel=1e-3)  # float32 logits of such a small loss


def test_features_are_read_from_the_cache(
    colors: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    first = train(colors, checkpoint, tmp_path / "first", tune="probe")
    assert [event for event in first if isinstance(event, Measuring) and event.what == "features"]
    second = train(colors, checkpoint, tmp_path / "second", tune="probe")
    assert not [event for event in second if isinstance(event, Measuring) and event.what == "features"]
    weights = [vitral.load(tmp_path / name).model.head.weight for name in ("first", "second")]
    assert torch.equal(*weights)


def test_a_run_from_a_probe_resumes_bit_for_bit(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    settings = {"from": str(checkpoint), **SETTINGS, "steps": 8, "tune": {"what": "last-blocks"}}
    list(train_events(colors, out=tmp_path / "undisturbed", **settings))
    interrupt_at(3, train_events(colors, out=tmp_path / "run", **settings))
    resumed = list(train_events(resume=tmp_path / "run"))
    assert not [event for event in candidates_of(resumed) if event.name.startswith("probe")]  # it is in the state
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run")
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("undisturbed", "run")]
    names = [[candidate["name"] for candidate in report["candidates"]] for report in reports]
    assert names[0] == names[1]


def test_a_run_killed_before_the_probe_was_written(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    settings = {"from": str(checkpoint), **SETTINGS, "steps": 4, "tune": {"what": "last-blocks"}}
    interrupt_at(1, train_events(colors, out=tmp_path / "run", **settings))
    for state in sorted((tmp_path / "run" / "state").iterdir())[1:]:
        for path in state.iterdir():
            path.unlink()
        state.rmdir()
    (tmp_path / "run" / "model.safetensors").unlink()
    events = list(train_events(resume=tmp_path / "run"))
    assert last(events, Started).step == 0
    assert isinstance(events[-1], Finished)


def test_a_short_time_budget_leaves_a_probe(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Without time for training, the run is that of `--tune probe`, and measures the features once."""
    events = train(colors, checkpoint, tmp_path / "run", minutes=0.01)
    assert isinstance(events[-1], Finished)
    assert last(events, Started).steps == 0
    assert not [event for event in events if isinstance(event, Measuring) and event.what == "novelty"]
    assert vitral.Run(tmp_path / "run").novelty.is_file()


@pytest.mark.parametrize("what", ["last-blocks", "lora"])
def test_a_run_without_time_for_training_resumes(colors: Path, checkpoint: Path, tmp_path: Path, what: str) -> None:
    """Killed while it measures the test split."""
    settings = {"from": str(checkpoint), **SETTINGS, "minutes": 0.01, "tune": {"what": what}}
    events = train_events(colors, out=tmp_path / "run", **settings)
    assert any(isinstance(event, Measuring) and event.what == "test" for event in events)
    events.close()  # pyright: ignore[reportAttributeAccessIssue]  # as a kill, nothing is written any more
    assert not (tmp_path / "run" / "report.json").is_file()
    resumed = list(train_events(resume=tmp_path / "run"))
    assert isinstance(resumed[-1], Finished)
    assert last(resumed, Started).steps == 0


def test_unreadable_training_images_are_counted(checkpoint: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 30, "green": 30}, size=(16, 16))
    broken = [data / "red" / f"{index:03d}.png" for index in range(0, 30, 2)]
    for path in broken:
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="training images cannot be read"):
        train(data, checkpoint, tmp_path / "run", epochs=1)
    train(data, checkpoint, tmp_path / "run", epochs=1, max_bad_fraction=0.5)
    skipped = (tmp_path / "run" / "skipped.txt").read_text()
    assert all(path.name in skipped for path in broken)


def test_a_refit_needs_validation_images_of_its_own(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 8, "green": 8}, size=(16, 16), split="train")
    for split in ("val", "test"):
        class_folders(data, {"red": 4, "green": 4}, size=(16, 16), split=split)
    with pytest.raises(ConfigError, match="refit"):
        train(data, checkpoint, tmp_path / "run", tune="last-blocks", epochs=1, refit=True)


def test_many_images_and_classes_are_searched_with_a_sample(
    colors: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.evaluation.linear_probe.MAX_SEARCHED", 3 * 40)
    tried = candidates_of(train(colors, checkpoint, tmp_path / "run", tune="probe"))
    assert {candidate.evidence for candidate in tried} == {"cross-validation on 40 images"}
    assert vitral.evaluate(tmp_path / "run").scores.top1 > 0.9


def test_novelty_stays_calibrated_on_images_that_were_not_trained_on(
    colors: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refit trains on the validation images, so the statistics are those from before it."""
    monkeypatch.setattr("vitral.training.comparison.choose_model", lambda outputs: (2, "for the test"))
    before: list[Novelty] = []
    for event in train_events(
        colors,
        out=tmp_path / "run",
        **{"from": str(checkpoint), **SETTINGS, "epochs": 2, "tune": {"what": "last-blocks"}},
    ):
        novelty = vitral.Run(tmp_path / "run").novelty
        if isinstance(event, Stepped) and novelty.is_file() and not before:
            before.append(Novelty.load(novelty))
    after = Novelty.load(vitral.Run(tmp_path / "run").novelty)
    assert torch.equal(before[0].quantiles, after.quantiles)
    assert torch.equal(before[0].mean, after.mean)


def test_a_head_of_zeros_as_in_the_paper(colors: Path, checkpoint: Path, tmp_path: Path) -> None:
    events = train(colors, checkpoint, tmp_path / "run", tune={"what": "all", "probe": False}, steps=2)
    assert not candidates_of(events)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["candidates"] == []


def test_a_bit_has_a_probe(colors: Path, tmp_path: Path) -> None:
    config = vitral.BiTConfig(stages=(1, 1, 1, 1), width_factor=0.5, image_size=32, num_classes=0)
    vitral.save(vitral.BiT(config), tmp_path / "bit.safetensors")
    events = train(colors, tmp_path / "bit.safetensors", tmp_path / "run", tune="probe")
    assert [candidate.name for candidate in candidates_of(events)] == [
        f"probe (mean of patches, {method})" for method in ("discriminant", "logistic regression", "average of both")
    ]


@pytest.mark.parametrize("pool", ["mean", "token+mean"])
def test_with_pool_keeps_everything_but_the_head(pool: str) -> None:
    model = small_model()
    pooled = with_pool(model, pool)
    assert isinstance(pooled, ViT)
    assert pooled.config.pool == pool
    images = torch.randn(2, 3, *model.config.image_hw)
    features = model.eval().features(images)
    assert isinstance(model.config, ViTConfig)
    expected = features.patches.mean(1)
    if pool == "token+mean":
        expected = torch.cat([features.cls, expected], dim=1)
    assert torch.equal(pooled.eval().features(images).pooled, expected)
    assert with_pool(model, model.config.pool) is model


@pytest.mark.parametrize("settings", [dict(steps=3), dict(epochs=2), dict(tune={"what": "probe", "probe": False})])
def test_a_probe_takes_no_steps(colors: Path, checkpoint: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="probe"):
        train(colors, checkpoint, tmp_path / "run", **{"tune": "probe", **settings})


def test_a_probe_needs_a_checkpoint(colors: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from"):
        list(train_events(colors, out=tmp_path / "run", tune={"what": "probe"}, device="cpu"))


def test_another_engine_computes_the_features(
    colors: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    events = train(colors, checkpoint, tmp_path / "openvino", tune="probe", engine="openvino")
    (choice,) = [event for event in events if isinstance(event, Chosen) and event.name == "engine"]
    assert choice.value == "openvino float32"
    train(colors, checkpoint, tmp_path / "torch", tune="probe")
    ours, plain = (vitral.Predictor(tmp_path / name)(str(colors)) for name in ("openvino", "torch"))
    for one, other in zip(ours, plain, strict=True):  # last bits of features change the search for a regularization
        assert one.probabilities == pytest.approx(other.probabilities, abs=0.01)
    with pytest.raises(ConfigError, match="this run has none"):
        list(train_events(colors, model="vit-pico4", engine="openvino", out=tmp_path / "run"))
