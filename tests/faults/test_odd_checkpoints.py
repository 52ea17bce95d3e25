"""Damage every tensor and every JSON value of every dialect in turn: each raises one sentence or is reported."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitral
from tests.conftest import small_model

State = dict[str, Tensor]


def states(folder: Path) -> dict[str, State]:
    checkpoints = {}
    for dialect, name in (("timm", "x.pth"), ("torchvision", "y.pth"), ("huggingface", "z.pth")):
        eps = 1e-12 if dialect == "huggingface" else 1e-6
        vitral.save(small_model(depth=1, norm_eps=eps), folder / name, dialect=dialect)
        checkpoints[dialect] = torch.load(folder / name, weights_only=True)
    for dialect, pool in (("google", "token"), ("big_vision", "map")):
        vitral.save(small_model(depth=1, activation="gelu-tanh", pool=pool), folder / "g.npz", dialect=dialect)
        with np.load(folder / "g.npz") as arrays:
            checkpoints[dialect] = {key: torch.from_numpy(arrays[key]) for key in arrays}
    return checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    return states(tmp_path_factory.mktemp("states"))


def load(state: State, dialect: str, folder: Path) -> vitral.Checkpoint:
    if dialect in ("google", "big_vision"):
        np.savez(folder / "x.npz", **{name: tensor.numpy() for name, tensor in state.items()})
        return vitral.load(folder / "x.npz")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "x.safetensors")
    return vitral.load(folder / "x.safetensors", heads=3)


DAMAGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "scalar": lambda tensor: tensor.flatten()[0].clone(),
    "one dimension more": lambda tensor: tensor[..., None],
    "flat": lambda tensor: tensor.flatten(),
    "empty": lambda tensor: tensor.flatten()[:0],
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "integers": lambda tensor: tensor.int(),
    "booleans": lambda tensor: tensor > 0,
    "infinite": lambda tensor: torch.full_like(tensor, float("inf")),
}
REPRESENTABLE = {"cls", "embedding/kernel", "params/embedding/kernel"}  # without a class token; with longer patches


@torch.no_grad()
@pytest.mark.parametrize("dialect", ["timm", "torchvision", "huggingface", "google", "big_vision"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_tensor_damaged(checkpoints: dict[str, State], dialect: str, damage: str, tmp_path: Path) -> None:
    whole = checkpoints[dialect]
    images = torch.randn(2, 3, 16, 16)
    expected = load(whole, dialect, tmp_path).model(images)
    for name in whole:
        changed = DAMAGES[damage](whole[name])
        if (
            changed is not None
            and changed.shape == whole[name].shape
            and changed.dtype == whole[name].dtype
            and (damage != "infinite")
        ):
            continue  # flat already
        state = {key: tensor for key, tensor in whole.items() if key != name}
        if changed is not None:
            state[name] = changed
        checkpoint = None
        with suppress(vitral.WeightsError):
            checkpoint = load(state, dialect, tmp_path)
        if checkpoint is None:
            continue
        assert checkpoint.report is not None
        if damage in ("one dimension more", "flat"):  # the same values in the same order
            assert torch.equal(checkpoint.model(images), expected), name
            continue
        # A file that another network of the dialect could have written is loaded as that one, and reported.
        reported = str(checkpoint.report.assumed) + str(checkpoint.report.initialized) + str(checkpoint.report.warnings)
        assert damage in ("missing", "longer"), (name, damage)
        assert any(word in reported for word in ("position", "image_size", "zero")) or name in REPRESENTABLE, (
            name,
            reported,
        )


def hf_folder(folder: Path) -> Path:
    vitral.save(small_model(norm_eps=1e-12), folder / "hf", dialect="huggingface", labels=list("abcdefg"))
    save_file(
        load_file(folder / "hf" / "model.safetensors"), folder / "hf" / "model.safetensors", metadata={"format": "pt"}
    )
    return folder / "hf"


def assert_one_sentence_or_loads(folder: Path, **overrides: Any) -> None:
    with suppress(vitral.VitralError):
        vitral.load(folder, **overrides)


ODD = [None, [], {}, "x", -1, 0, 1.5, True, 10**400, ["x"], {"0": 1}]


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_odd_values_in_the_files_of_transformers(file: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    content = json.loads((folder / file).read_text())
    for name in content:
        for value in ODD:
            (folder / file).write_text(json.dumps({**content, name: value}))
            assert_one_sentence_or_loads(folder)


def test_odd_values_in_the_files_of_timm(tmp_path: Path) -> None:
    folder = tmp_path / "timm"
    vitral.save(small_model(), folder, dialect="timm")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for section in ("", "model_args", "pretrained_cfg"):
        inner = content[section] if section else content
        for name in inner:
            for value in ODD:
                changed = {**inner, name: value}
                (folder / "config.json").write_text(json.dumps({**content, section: changed} if section else changed))
                assert_one_sentence_or_loads(folder, heads=3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"global_pool": "max"}, "global_pool"),
        ({"model_args": {"act_layer": "silu"}}, "act_layer"),
        ({"model_args": {"pool_include_prefix": True}}, "pool_include_prefix"),
        ({"architecture": "eva02_tiny_patch14_224"}, "rotates queries"),
    ],
)
def test_unsupported_settings_of_timm_are_refused(content: dict[str, Any], reason: str, tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "t", dialect="timm")
    save_file(load_file(tmp_path / "t" / "model.safetensors"), tmp_path / "t" / "model.safetensors")
    (tmp_path / "t" / "config.json").write_text(json.dumps({"architecture": "vit_x", **content}))
    with pytest.raises(vitral.WeightsError, match=reason):
        vitral.load(tmp_path / "t", heads=3)


def test_labels_with_gaps_are_ignored(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    assert vitral.load(folder).labels == tuple("abcdefg")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(2 * index): "x" for index in range(7)}
    (folder / "config.json").write_text(json.dumps(config))
    assert vitral.load(folder).labels is None


def test_a_dictionary_in_itself(tmp_path: Path) -> None:
    inside: dict[str, Any] = {}
    inside["model"] = inside
    torch.save(inside, tmp_path / "x.pth")
    with pytest.raises(vitral.WeightsError, match="state dict of tensors"):
        vitral.load(tmp_path / "x.pth")


def test_a_state_dict_beside_other_tensors(tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "x.pth", dialect="timm")
    state = torch.load(tmp_path / "x.pth", weights_only=True)
    torch.save(
        {"model": {f"module.{name}": x for name, x in state.items()}, "loss": torch.tensor(1.0)}, tmp_path / "y.pth"
    )
    checkpoint = vitral.load(tmp_path / "y.pth", heads=3)
    assert checkpoint.report is not None
    assert "loss" in checkpoint.report.ignored
    assert "module.patch_embed.proj.weight" in checkpoint.report.renamed  # as the file calls it


def test_flipped_bits_in_compressed_arrays(tmp_path: Path) -> None:
    vitral.save(small_model(activation="gelu-tanh"), tmp_path / "x.npz", dialect="google")
    with np.load(tmp_path / "x.npz") as arrays:
        np.savez_compressed(tmp_path / "y.npz", **arrays)
    content = (tmp_path / "y.npz").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(content)
        broken[int(random.integers(len(broken)))] ^= 1 << int(random.integers(8))
        (tmp_path / "z.npz").write_bytes(broken)
        try:
            vitral.load(tmp_path / "z.npz")
        except vitral.WeightsError:
            continue


@pytest.mark.parametrize("path", ["a" * 5000, "~nobody-of-this-name/x", "x\0y", None, 5, b"x", ""])
def test_invalid_paths(path: Any) -> None:
    with pytest.raises(vitral.VitralError):
        vitral.load(path)
    with pytest.raises(vitral.VitralError):
        vitral.save(small_model(), path)


@pytest.mark.parametrize(
    "options",
    [
        dict(dialect=[]),
        dict(preprocess=5),
        dict(preprocess={"size": (1, 1)}),
        dict(labels=5),
        dict(labels="abcdefg"),
        dict(labels={"a", "b", "c", "d", "e", "f", "g"}),
        dict(labels=["a"]),
    ],
)
def test_saving_with_odd_arguments(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError):
        vitral.save(small_model(), tmp_path / "x.safetensors", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "overrides", [dict(image_size=10**6), dict(image_size=4 * 10**8), dict(channels=10**6), dict(registers=2**30)]
)
def test_overrides_that_no_memory_holds(overrides: dict[str, Any], tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "x.safetensors")
    with pytest.raises(vitral.VitralError):
        vitral.load(tmp_path / "x.safetensors", **overrides)


def test_a_model_that_is_not_what_its_config_says(tmp_path: Path) -> None:
    model = small_model()
    model.head = torch.nn.Linear(48, 9)
    with pytest.raises(vitral.WeightsError, match="head"):
        vitral.save(model, tmp_path / "x.safetensors")
    model.head = torch.nn.Identity()
    with pytest.raises(vitral.WeightsError, match="head"):
        vitral.save(model, tmp_path / "x.safetensors")
    broken = small_model()
    with torch.no_grad():
        broken.norm.bias[0] = float("nan")
    with pytest.raises(vitral.WeightsError, match=r"norm\.bias"):
        vitral.save(broken, tmp_path / "x.safetensors")


def test_a_new_head_has_the_precision_of_the_rest(tmp_path: Path) -> None:
    vitral.save(small_model().bfloat16(), tmp_path / "x.safetensors")
    loaded = vitral.load(tmp_path / "x.safetensors", num_classes=3)
    assert loaded.model(torch.randn(1, 3, 16, 16).bfloat16()).shape == (1, 3)


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 64), (24, 64)])
def test_our_own_files_of_timm_that_are_not_square(size: tuple[int, int], tmp_path: Path) -> None:
    model = small_model(image_size=size, patch_size=8)
    images = torch.randn(2, 3, *size)
    for name in ("x.safetensors", "folder"):
        vitral.save(model, tmp_path / name, dialect="timm")
        assert torch.equal(vitral.load(tmp_path / name).model(images), model(images))
    written = vitral.save(model, tmp_path / "x.pth", dialect="timm")
    assert torch.equal(vitral.load(tmp_path / "x.pth", **written.load_options).model(images), model(images))


def test_fields_that_a_file_cannot_store_are_returned(tmp_path: Path) -> None:
    model = small_model(pool="mean", class_token=True)
    written = vitral.save(model, tmp_path / "x.pth", dialect="timm", labels=list("abcdefg"))
    assert written.load_options["pool"] == "mean"
    assert "labels" in str(written.notes)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vitral.load(tmp_path / "x.pth", **written.load_options).model(images), model(images))


def test_assumptions_are_inherited(tmp_path: Path) -> None:
    vitral.save(small_model(width=64, heads=1), tmp_path / "x.pth", dialect="timm")
    loaded = vitral.load(tmp_path / "x.pth")
    vitral.save(loaded, tmp_path / "x.safetensors")
    again = vitral.load(tmp_path / "x.safetensors")
    assert again.report is not None
    assert "DeiT" in str(again.report.assumed)
    changed = vitral.load(tmp_path / "x.safetensors", preprocess=dict(mean=(0.4, 0.4, 0.4)))
    assert changed.report is not None
    assert "DeiT" not in str(changed.report.assumed)


def test_other_pools_on_any_dialect(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 16, 16)
    for dialect in ("timm", "torchvision", "huggingface"):
        vitral.save(small_model(), tmp_path / f"{dialect}.safetensors", dialect=dialect)
        for overrides in (dict(pool="map"), dict(pool="mean"), dict(pool="mean", class_token=False)):
            assert vitral.load(tmp_path / f"{dialect}.safetensors", **overrides).model(images).shape == (2, 7)


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    vitral.save(small_model(), tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o044
    (tmp_path / "real.safetensors").write_bytes(b"")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real.safetensors")
    vitral.save(small_model(), tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert vitral.load(tmp_path / "real.safetensors").model.config.width == 48
