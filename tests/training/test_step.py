"""One step: the moving average, micro-batches, half precision, and gradients that are not finite."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import small_model
from tests.data.images import class_folders
from tests.training.short_runs import TINY, interrupt_at, last, train
from vitral.training.entry import train_events
from vitral.training.events import Finished, Stepped
from vitral.training.state import load_state
from vitral.training.step import Learner, MovingAverage, TrainingError, swapped_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(20, 24))


def test_the_average_follows_the_weights() -> None:
    model = small_model()
    average = MovingAverage(model, 0.9)
    start = model.norm.weight.detach().clone()
    with torch.no_grad():
        model.norm.weight.add_(1.0)
    average.update(model)
    average.update(model)
    torch.testing.assert_close(average.values["norm.weight"], start + 1 - 0.81)


def test_swapped_weights_come_back() -> None:
    model = small_model()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    with suppress(KeyError), swapped_weights(model, zeros):
        assert not any(tensor.any() for tensor in model.state_dict().values())
        raise KeyError
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def test_micro_batches_add_up(folder: Path, tmp_path: Path) -> None:
    """With noise, too, which belongs to the images."""
    losses, noise = {}, dict(dropout=0.2, drop_path=0.3)
    for parts in (1, 4):
        settings = dict(epochs="auto", steps=3, accumulate=parts, loss=dict(class_weights="balanced"), **noise)
        events = train(folder, tmp_path / str(parts), **settings)
        losses[parts] = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[1] == pytest.approx(losses[4], rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    compute_gradients = Learner.compute_gradients

    def poisoned(self: Learner, batch: Any, step: int, loss_scale: float) -> float:
        loss = compute_gradients(self, batch, step, loss_scale)
        if step == 3:
            seen["before"] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            seen["model"] = self.model
            next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return loss

    monkeypatch.setattr(Learner, "compute_gradients", poisoned)
    with pytest.raises(TrainingError, match=r"Step 3: .*Images of this step: .*\.png.*Lower optim\.lr \(0\.002\)"):
        train(folder, tmp_path / "run")
    for name, parameter in seen["model"].named_parameters():
        assert torch.equal(parameter, seen["before"][name])


def test_half_precision_skips_steps_that_overflow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = train(folder, tmp_path / "run", precision="float16", epochs=6)
    assert last(events, Finished).test["top1"] > 0.8
    loss_scale = read_loss_scale(tmp_path / "run")
    assert 1 <= loss_scale <= 2**14
    monkeypatch.setattr("vitral.training.step.SCALE_GROWTH_STEPS", 5)  # after so many in range, the scale grows again
    settings = {**TINY, "precision": "float16", "epochs": 6}
    interrupt_at(7, train_events(folder, out=tmp_path / "parts", **settings))
    list(train_events(resume=tmp_path / "parts"))
    train(folder, tmp_path / "whole", precision="float16", epochs=6)
    scales = [read_loss_scale(tmp_path / name) for name in ("whole", "parts")]
    assert scales[0] == scales[1] > loss_scale


def read_loss_scale(folder: Path) -> float:
    loaded = load_state(folder / "state")
    assert loaded is not None
    return loaded[0].loss_scale
