"""BiT equals timm's with random weights, through Google's npz files and through timm's names, both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from benchmarks.peers import repair_torchvision
from vitral.errors import WeightsError


def timm_model(num_classes: int) -> Any:
    repair_torchvision()
    import timm

    return timm.create_model("resnetv2_50x1_bit", num_classes=num_classes).eval()


def randomize(model: torch.nn.Module) -> None:
    """Draw weights so large that the epsilon of the standardization (1e-8 in timm, 1e-10 here) does not matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            if "head" in name:
                parameter.copy_(noise * 0.01)
            else:
                parameter.copy_(1 + 0.1 * noise if is_scale else noise * (0.1 if parameter.ndim == 1 else 0.5))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(1))


def test_timm_reads_our_files(tmp_path: Path, images: torch.Tensor) -> None:
    """timm's reader of Google's files reads the files that vitral writes."""
    ours = vitral.create("bit-r50x1", num_classes=21).eval()
    randomize(ours)
    vitral.save(ours, tmp_path / "bit.npz", dialect="bit")
    theirs = timm_model(21)
    with torch.no_grad():
        theirs.load_pretrained(str(tmp_path / "bit.npz"))
        assert (ours(images) - theirs(images)).abs().max() < 1e-5


def test_other_depths_and_widths(tmp_path: Path) -> None:
    repair_torchvision()
    from timm.models.resnetv2 import _create_resnetv2_bit

    theirs = _create_resnetv2_bit("resnetv2_50x1_bit", layers=[2, 1, 3, 1], width_factor=2, num_classes=7).eval()
    randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = vitral.load(tmp_path / "timm.pth").model
    assert isinstance(ours, vitral.BiT)
    assert (ours.config.stages, ours.config.width_factor) == ((2, 1, 3, 1), 2)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert (ours(images) - theirs(images)).abs().max() < 1e-5
        vitral.save(ours, tmp_path / "google.npz", dialect="bit")
        torch.nn.init.zeros_(theirs.stem.conv.weight)
        theirs.load_pretrained(str(tmp_path / "google.npz"))
        assert (ours(images) - theirs(images)).abs().max() < 1e-5


def test_our_loader_reads_timm(tmp_path: Path, images: torch.Tensor) -> None:
    theirs = timm_model(7)
    randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = vitral.load(tmp_path / "timm.pth").model
    assert isinstance(ours, vitral.BiT)
    assert ours.config.stages == (3, 4, 6, 3)
    with torch.no_grad():
        assert (ours(images) - theirs(images)).abs().max() < 1e-5
    vitral.save(ours, tmp_path / "google.npz", dialect="bit")
    with np.load(tmp_path / "google.npz") as arrays:  # some published files number every convolution
        named = {name.replace("standardized_conv2d", "standardized_conv2d_3"): arrays[name] for name in arrays}
    np.savez(tmp_path / "numbered.npz", **named)
    with torch.no_grad():
        expected = ours(images)
        for name in ("google.npz", "numbered.npz"):
            assert torch.equal(vitral.load(tmp_path / name, image_size=64).model(images), expected)


def test_config_json_of_timm_is_read(tmp_path: Path) -> None:
    """timm writes size, preprocessing and labels into a config.json beside its weights."""
    theirs = timm_model(3)
    from timm.models import save_for_hf

    fields = dict(
        input_size=(3, 96, 96), crop_pct=0.9, interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    theirs.pretrained_cfg = {**theirs.pretrained_cfg, **fields, "label_names": ["a", "b", "c"]}
    save_for_hf(theirs, tmp_path, model_config=dict(label_names=["a", "b", "c"]), safe_serialization=True)
    checkpoint = vitral.load(tmp_path)
    assert checkpoint.labels == ("a", "b", "c")
    assert checkpoint.model.config.image_hw == (96, 96)
    assert checkpoint.preprocess == vitral.Preprocess(
        size=(96, 96), resize="crop", crop_fraction=0.9, interpolation="bicubic", mean=fields["mean"], std=fields["std"]
    )
    assert checkpoint.report is not None
    assert checkpoint.report.assumed == ()


def test_head_and_channels_can_be_changed(tmp_path: Path) -> None:
    ours = vitral.create("bit-r26x1", stages=(1, 1, 1, 1), num_classes=5)
    randomize(ours)
    vitral.save(ours, tmp_path / "bit.safetensors", labels=list("abcde"))
    same = vitral.load(tmp_path / "bit.safetensors")
    assert same.labels == tuple("abcde")
    assert isinstance(same.model, vitral.BiT)
    assert same.model.config == ours.config
    other = vitral.load(tmp_path / "bit.safetensors", num_classes=3, channels=1).model
    gray = torch.randn(1, 1, 64, 64)
    assert not other(gray).any()
    assert torch.allclose(other.root.weight, ours.root.weight.sum(1, keepdim=True))  # type: ignore[union-attr]


def test_list_equals_single_images(images: torch.Tensor) -> None:
    model = vitral.create("bit-r26x1", stages=(1, 1, 1, 1), num_classes=4).eval()
    randomize(model)
    several = [images[0], images[0, :, :33, :47], images[1], images[1, :, 5:38, :47]]  # two of each size
    alone = [model(image[None]) for image in several]
    assert torch.allclose(model(several), torch.cat(alone), atol=1e-6)
    features = model.features(several)
    assert [image.grid for image in features] == [(3, 2), (2, 2), (3, 2), (2, 2)]
    assert features[0].maps.shape == (1, 2048, 3, 2)
    for image, packed in zip(several, features, strict=True):
        # A batch sums in another order than a single image.
        assert torch.allclose(packed.pooled, model.features(image[None]).pooled, atol=1e-5)


def test_unsupported_uses_of_a_bit(tmp_path: Path) -> None:
    model = vitral.create("bit-r26x1")
    with pytest.raises(WeightsError, match="ViTs.*BiT"):
        vitral.save(model, tmp_path / "x.npz", dialect="google")
    with pytest.raises(WeightsError, match="BiTs.*ViT"):
        vitral.save(vitral.create("vit-pico7"), tmp_path / "x.npz", dialect="bit")
    with pytest.raises(vitral.ConfigError, match="no field 'pool'"):
        vitral.create("bit-r50x1", pool="mean")
    with pytest.raises(vitral.ConfigError, match="26, 50, 101, 152, 200"):
        vitral.create("bit-r34x1")
    for stages in (3, "3463", (3, 4, 6), [3, 4, 6, 0]):
        with pytest.raises(vitral.ConfigError, match="stages must be"):
            vitral.create("bit-r50x1", stages=stages)
    with pytest.raises(vitral.ConfigError, match="attention"), vitral.record_attention(model):  # type: ignore[arg-type]
        pass


def test_gradient_checkpointing_changes_nothing(images: torch.Tensor) -> None:
    model = vitral.create("bit-r26x1", stages=(2, 1, 1, 1), num_classes=3)
    randomize(model)
    gradients = []
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 1, 32, 32), "channels=3.*have 1"),
        ([], "list of images is empty"),
        ([torch.zeros(1, 32, 32)], r"images\[0\]"),
    ],
)
def test_invalid_images(images: Any, message: str) -> None:
    model = vitral.create("bit-r50x1", stages=(1, 1, 1, 1), num_classes=3)
    for function in (model, model.features):
        with pytest.raises(vitral.DataError, match=message):
            function(images)
