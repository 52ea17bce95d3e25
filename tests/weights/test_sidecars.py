"""Read config.json and preprocessor_config.json beside other libraries' weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from benchmarks.peers import repair_torchvision
from tests.conftest import small_model
from vitral.weights.checkpoint import Checkpoint, default_preprocess
from vitral.weights.dialects.timm import read_config_json
from vitral.weights.formats.tensor_file import TensorFile


def transformers_folder(folder: Path, *, multi_label: bool = False, **processor: Any) -> Path:
    """Write a folder as transformers does, without our hints."""
    model = small_model(image_size=16, num_classes=3, activation="gelu")
    vitral.save(
        Checkpoint(model=model, preprocess=default_preprocess(model), multi_label=multi_label),
        folder,
        dialect="huggingface",
    )
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_multi_label_is_stored_as_in_transformers(tmp_path: Path) -> None:
    assert vitral.load(transformers_folder(tmp_path / "many", multi_label=True)).multi_label
    assert json.loads((tmp_path / "many" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert not vitral.load(transformers_folder(tmp_path / "one")).multi_label


def test_multi_label_that_a_dialect_cannot_store_is_noted(tmp_path: Path) -> None:
    model = small_model(image_size=16, num_classes=3, activation="gelu-tanh")
    kept = Checkpoint(model=model, preprocess=default_preprocess(model), multi_label=True)
    written = vitral.save(kept, tmp_path / "x.npz", dialect="google")
    assert any("several labels" in note for note in written.notes)


@pytest.mark.parametrize(
    ("processor", "fraction", "difference"),
    [
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}, 0.8, ""),
        ({"size": {"shortest_edge": 10}, "do_center_crop": True, "crop_size": 8}, 0.8, "not 8 x 8"),
        ({"size": {"height": 20, "width": 20}, "do_center_crop": True, "crop_size": 16}, 0.8, "squashes to 20 x 20"),
        ({"size": {"height": 16, "width": 16}}, 1.0, ""),
        ({"size": {"height": 16, "width": 16}, "do_resize": False}, 1.0, "size unchanged"),
        ({"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5}, 1.0, "another scale"),
    ],
)
def test_preprocessor_config(processor: dict[str, Any], fraction: float, difference: str, tmp_path: Path) -> None:
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, **processor}
    loaded = vitral.load(transformers_folder(tmp_path / "x", **settings))
    assert loaded.preprocess.crop_fraction == pytest.approx(fraction)
    assert loaded.preprocess.resize == ("crop" if processor.get("do_center_crop") else "squash")
    assert loaded.report is not None
    assumed = [sentence for sentence in loaded.report.assumed if sentence.startswith("preprocessing")]
    assert [difference in sentence for sentence in assumed] == ([True] if difference else [])


@pytest.mark.parametrize(
    "name",
    ["deit3_small_patch16_224", "vit_little_patch16_reg4_gap_256", "test_vit2"],
)
def test_the_assumed_preprocessing_of_a_bare_file_is_that_of_timm(name: str, tmp_path: Path) -> None:
    repair_torchvision()
    import timm

    theirs: Any = timm.create_model(name, depth=1)
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    loaded = vitral.load(tmp_path / "bare.pth", heads=theirs.blocks[0].attn.num_heads)
    assert loaded.preprocess.mean == pytest.approx(theirs.pretrained_cfg["mean"])
    assert loaded.preprocess.std == pytest.approx(theirs.pretrained_cfg["std"])


def test_activations_implied_by_timms_names_are_those_timm_builds() -> None:
    repair_torchvision()
    import timm
    from timm.layers.activations import GELUTanh

    names = [name for name in timm.list_models("vit_*siglip*") if "naflex" not in name]
    assert len(names) > 15
    for name in names:
        with torch.device("meta"):
            model: Any = timm.create_model(name, depth=1)
        act = model.blocks[0].mlp.act
        is_tanh = isinstance(act, GELUTanh) or getattr(act, "approximate", "none") == "tanh"
        sidecars = {"config.json": {"architecture": name}}
        file = TensorFile(path=None, format="memory", shapes={}, read=torch.empty, sidecars=sidecars)  # type: ignore[arg-type]
        assert read_config_json(file).activation == ("gelu-tanh" if is_tanh else None), name
