"""Loading a model for inference."""

from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral.errors import ConfigError, WeightsError
from vitral.inference.loaded_model import load_model
from vitral.weights.checkpoint import Checkpoint, default_preprocess


def checkpoint(labels: tuple[str, ...] | None = None, **fields: Any) -> Checkpoint:
    model = small_model(**fields)
    return Checkpoint(model=model, preprocess=default_preprocess(model), labels=labels)


def test_a_run_folder_and_its_file_are_the_same_model(run: Path) -> None:
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    folder, file = load_model(run), load_model(run / "model.safetensors")
    assert folder.run is not None
    assert file.run is None
    assert folder.labels == file.labels == ("blue", "green", "red")
    assert torch.equal(folder.logits(images), file.logits(images))


def test_a_list_of_images_gives_the_outputs_of_a_batch() -> None:
    model = load_model(checkpoint(), device="cpu")
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(model.logits(list(images)), model.logits(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.features(list(images)), model.features(images), atol=1e-5, rtol=1e-5)
    assert model.features(images).shape == (4, 48)


def test_labels_without_names_are_numbers() -> None:
    model = load_model(checkpoint(num_classes=3))
    assert (model.labels, model.has_names) == (("0", "1", "2"), False)
    assert load_model(checkpoint(("a", "b", "c"), num_classes=3)).has_names


def test_probabilities_sum_to_one_unless_multi_label() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    single = load_model(checkpoint(num_classes=3))
    assert single.probabilities(logits).sum().item() == pytest.approx(1.0)
    several = load_model(Checkpoint(model=single.model, preprocess=single.preprocess, multi_label=True))
    assert torch.equal(several.probabilities(logits), logits.sigmoid())


def test_models_without_predictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="no classification head"):
        load_model(checkpoint(num_classes=0)).check_has_head()
    with pytest.raises(ConfigError, match="per token"):
        load_model(checkpoint(pool="none", class_token=False)).check_has_head()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_must_be_finite(value: float) -> None:
    outputs = torch.tensor([[0.0, value]])
    with pytest.raises(WeightsError, match="NaN or Inf: its weights are damaged or too large"):
        load_model(checkpoint()).check_finite(outputs)
    with pytest.raises(WeightsError, match="bfloat16"):
        load_model(checkpoint(), precision="bfloat16").check_finite(outputs)
    assert torch.equal(load_model(checkpoint()).check_finite(torch.zeros(1, 2)), torch.zeros(1, 2))


def test_precision_and_source_are_checked(run: Path) -> None:
    with pytest.raises(ConfigError, match="precision.*'int8'"):
        load_model(run, precision="int8")
    with pytest.raises(ConfigError, match="got 5"):
        load_model(5)  # type: ignore[arg-type]
    with pytest.raises(vitral.VitralError, match="nowhere"):
        load_model("nowhere")


def test_labels_of_another_head_are_refused() -> None:
    changed = checkpoint(("a", "b", "c"), num_classes=3)
    changed.model.reset_head(5)
    with pytest.raises(ConfigError, match="5 classes, but there are 3 labels"):
        load_model(changed)
