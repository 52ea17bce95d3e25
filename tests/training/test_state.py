"""Saved states: the newest intact one is used, forged ones are refused, and they must fit the network."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from vitral.data.batches import Batch
from vitral.data.dataset import FileSource, Item
from vitral.files import sha256_of
from vitral.runs import Run
from vitral.training.selection import BestEpoch
from vitral.training.state import TrainState, UnreadableImages, check_fits, load_state, save_state

TENSORS = {"model:a": torch.ones(2)}


def damage(path: Path) -> None:
    (path / "tensors.safetensors").write_bytes(b"nothing")


def forge(path: Path, text: str) -> None:
    """Replace state.json, with a manifest that matches it."""
    (path / "state.json").write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["state.json"] = {"sha256": sha256_of(path / "state.json"), "bytes": len(text)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    state = TrainState(step=3, seconds=1.5, loss_sum=2.5, loss_steps=3, is_unscored=True, loss_scale=2.0)
    state.steps_in_range = 2
    state.best = BestEpoch(top1=0.5, loss=0.25, step=2, epoch=1)
    state.unreadable = UnreadableImages(reasons={"a.png": "empty"}, training=1, reported=1)
    path = save_state(tmp_path, state, TENSORS)
    assert path == tmp_path / "step-00000003"
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert loaded[0] == state
    assert torch.equal(loaded[1]["model:a"], TENSORS["model:a"])
    assert loaded[2] == []


def test_a_state_without_scores_comes_back(tmp_path: Path) -> None:
    """The best loss is infinite before the first epoch, and predicted pixels have no accuracy."""
    save_state(tmp_path, TrainState(step=1, best=BestEpoch(top1=float("nan"))), TENSORS)
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert loaded[0].best.top1 != loaded[0].best.top1
    assert loaded[0].best.loss == float("inf")


def test_the_state_before_a_damaged_one_is_used(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    for step in (1, 2):
        save_state(tmp_path, TrainState(step=step), TENSORS)
    (tmp_path / "step-00000002 copy").mkdir()  # not ours
    damage(tmp_path / "step-00000002")
    loaded = load_state(tmp_path)
    assert loaded is not None
    state, _, (problem,) = loaded
    assert state.step == 1
    assert "step-00000002 is damaged (tensors.safetensors" in problem
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(
        vitral.VitralError, match=r"step-00000002 .*; step-00000001 .*manifest\.json.*another --out"
    ) as caught:
        load_state(tmp_path)
    assert "before it" not in str(caught.value)


def test_two_states_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.tmp-0").mkdir()  # of a process that was killed while saving
    for step in range(1, 5):
        save_state(tmp_path, TrainState(step=step), TENSORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_full_disk_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, TrainState(step=1), TENSORS)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(vitral.VitralError, match=f"{tmp_path}: No space"):
        save_state(tmp_path, TrainState(step=2), TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# ---- forged states ----

INTACT = json.dumps(
    {
        "step": 1,
        "seconds": 0.0,
        "loss_sum": 0.0,
        "loss_steps": 0,
        "is_unscored": False,
        "loss_scale": 1.0,
        "steps_in_range": 0,
        "best": {"top1": -1.0, "loss": 1.0, "step": 0, "epoch": -1},
        "unreadable": {"reasons": {}, "training": 0, "reported": 0},
    }
)


def forged_texts() -> list[str]:
    content: dict[str, Any] = json.loads(INTACT)
    texts = ["", "{", "[]", "{}", "null", "5", "[[1, 2]]", '{"best": 5, "unreadable": 5}', "[" * 100_000]
    texts += [
        json.dumps({key: value for key, value in content.items() if key != name}) for name in ("best", "unreadable")
    ]
    texts.append(json.dumps({**content, "extra": 1}))
    wrong: dict[str, list[Any]] = {
        "step": ["1", None, True, -1, 1.5, 2, 10**40, [], {}],
        "seconds": ["1", None, float("nan"), float("inf"), 10**400, []],
        "loss_sum": ["1", None, float("nan")],
        "loss_steps": ["1", -1, 0.5],
        "loss_scale": ["1", None, float("inf")],
        "steps_in_range": ["1", -1],
        "best": [5, [], {"step": 1, "x": 2}],
        "unreadable": [5, [], {"x": 2}, {"reasons": 5}, {"reasons": {"a": 5}}, {"training": "x"}, {"reported": 0.5}],
    }
    texts += [json.dumps({**content, name: value}) for name, values in wrong.items() for value in values]
    for name, value in (("top1", "x"), ("loss", None), ("step", -1), ("epoch", "x"), ("epoch", 0.5)):
        texts.append(json.dumps({**content, "best": {**content["best"], name: value}}))
    return texts


@pytest.mark.parametrize("text", forged_texts(), ids=lambda text: text[:60] or "empty")
def test_a_forged_state_is_one_error(tmp_path: Path, text: str) -> None:
    path = save_state(tmp_path, TrainState(step=1), TENSORS)
    forge(path, INTACT)
    assert load_state(tmp_path) is not None
    forge(path, text)
    with pytest.raises(vitral.VitralError, match="No saved state .*step-00000001 is damaged"):
        load_state(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"state.json": 5}', "[" * 100_000])
def test_a_forged_manifest_is_one_error(tmp_path: Path, text: str) -> None:
    path = save_state(tmp_path, TrainState(step=1), TENSORS)
    (path / "manifest.json").write_text(text)
    with pytest.raises(vitral.VitralError, match="No saved state .*step-00000001 is damaged"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    ("expected", "fragment"),
    [
        ({"model:a": (3,)}, r"a has shape \(2,\) \(expected \(3,\)\)"),
        ({"model:a": (2,), "model:b": (1,)}, "b is missing"),
        ({}, "a is unexpected"),
    ],
)
def test_a_state_of_another_network(tmp_path: Path, expected: dict[str, tuple[int, ...]], fragment: str) -> None:
    tensors = {"model:a": torch.ones(2), "optimizer:0/a/step": torch.ones(1)}
    check_fits(tensors, {"model:a": torch.zeros(2)}, tmp_path)
    with pytest.raises(vitral.ConfigError, match=rf"config\.toml: {fragment}.*Restore"):
        check_fits(tensors, {name: torch.zeros(shape) for name, shape in expected.items()}, tmp_path)


def test_a_state_of_another_dtype(tmp_path: Path) -> None:
    tensors = {"model:a": torch.ones(2, dtype=torch.int8)}
    with pytest.raises(vitral.ConfigError, match=r"a has torch\.int8 and shape \(2,\)"):
        check_fits(tensors, {"model:a": torch.zeros(2)}, tmp_path)


# ---- unreadable images ----


def test_unreadable_images_are_counted_once(tmp_path: Path) -> None:
    run, unreadable = Run(tmp_path), UnreadableImages()
    items = [Item(f"{index}.png", 0, FileSource("")) for index in range(100)]
    batch = Batch(images=[], labels=torch.zeros(1), items=torch.tensor([5]), bad=((3, "empty"), (4, "truncated")))
    for _ in range(2):  # the next epoch meets them again
        unreadable.add_batch(batch, items, run, 0.02)
    unreadable.add([("4.png", "truncated"), ("other.png", "corrupt")], run)
    assert unreadable.reasons == {"3.png": "empty", "4.png": "truncated", "other.png": "corrupt"}
    assert unreadable.training == 2
    assert run.skipped.read_text() == "3.png\tempty\n4.png\ttruncated\nother.png\tcorrupt\n"
    message = unreadable.report_new(run)
    assert message is not None
    assert "3.png: empty (and 2 more)" in message
    assert unreadable.report_new(run) is None
    with pytest.raises(vitral.DataError, match=r"2 of 100 .*3\.png \(empty\).*1% .*--max-bad-fraction"):
        unreadable.add_batch(batch, items, run, 0.01)
    empty = Batch(images=[], labels=torch.zeros(0), items=torch.zeros(0), bad=((3, "empty"),))
    with pytest.raises(vitral.DataError, match="cannot be read"):
        unreadable.add_batch(empty, items, run, 1.0)
