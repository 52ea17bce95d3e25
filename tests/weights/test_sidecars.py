"""What stands beside the weights of others, and what is made of it: config.json, preprocessor_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from benchmarks.peers import mend_torchvision
from tests.conftest import small_model
from vitral.weights.checkpoint import Checkpoint, default_preprocess
from vitral.weights.dialects.timm_json import ConfigJson


def transformers_folder(folder: Path, *, multi_label: bool = False, **processor: Any) -> Path:
    """As transformers leaves one: without our hints."""
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


def test_several_labels_a_picture_are_told_as_transformers_does(tmp_path: Path) -> None:
    assert vitral.load(transformers_folder(tmp_path / "many", multi_label=True)).multi_label
    assert json.loads((tmp_path / "many" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert not vitral.load(transformers_folder(tmp_path / "one")).multi_label


def test_several_labels_a_picture_that_a_file_cannot_tell_are_told(tmp_path: Path) -> None:
    model = small_model(image_size=16, num_classes=3, activation="gelu-tanh")
    kept = Checkpoint(model=model, preprocess=default_preprocess(model), multi_label=True)
    written = vitral.save(kept, tmp_path / "x.npz", dialect="google")
    assert any("several labels" in note for note in written.notes)


@pytest.mark.parametrize(
    ("processor", "fraction", "said"),
    [
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}, 0.8, ""),
        ({"size": {"shortest_edge": 10}, "do_center_crop": True, "crop_size": 8}, 0.8, "not 8 x 8"),
        ({"size": {"height": 20, "width": 20}, "do_center_crop": True, "crop_size": 16}, 0.8, "squashes to 20 x 20"),
        ({"size": {"height": 16, "width": 16}}, 1.0, ""),
        ({"size": {"height": 16, "width": 16}, "do_resize": False}, 1.0, "leaves them as they are"),
        ({"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5}, 1.0, "another scale"),
    ],
)
def test_what_a_preprocessor_says(processor: dict[str, Any], fraction: float, said: str, tmp_path: Path) -> None:
    told = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, **processor}
    found = vitral.load(transformers_folder(tmp_path / "x", **told))
    assert found.preprocess.crop_fraction == pytest.approx(fraction)
    assert found.preprocess.resize == ("crop" if processor.get("do_center_crop") else "squash")
    assert found.report is not None
    assumed = [sentence for sentence in found.report.assumed if sentence.startswith("preprocessing")]
    assert [said in sentence for sentence in assumed] == ([True] if said else [])


@pytest.mark.parametrize(
    "name",
    ["deit3_small_patch16_224", "vit_little_patch16_reg4_gap_256", "test_vit2"],
)
def test_what_is_guessed_of_a_bare_file_is_what_timm_uses(name: str, tmp_path: Path) -> None:
    mend_torchvision()
    import timm

    theirs: Any = timm.create_model(name, depth=1)
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    found = vitral.load(tmp_path / "bare.pth", heads=theirs.blocks[0].attn.num_heads)
    assert found.preprocess.mean == pytest.approx(theirs.pretrained_cfg["mean"])
    assert found.preprocess.std == pytest.approx(theirs.pretrained_cfg["std"])


def test_what_timms_names_imply_is_what_timm_builds() -> None:
    mend_torchvision()
    import timm
    from timm.layers.activations import GELUTanh

    names = [name for name in timm.list_models("vit_*siglip*") if "naflex" not in name]
    assert len(names) > 15
    for name in names:
        with torch.device("meta"):
            model: Any = timm.create_model(name, depth=1)
        act = model.blocks[0].mlp.act
        is_tanh = isinstance(act, GELUTanh) or getattr(act, "approximate", "none") == "tanh"
        found = ConfigJson(architecture=name, arguments={}, pretrained={}, global_pool=None)
        assert found.activation == ("gelu-tanh" if is_tanh else None), name
