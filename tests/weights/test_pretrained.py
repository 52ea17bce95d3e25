"""The table of published checkpoints: every row against the library that wrote its file. No row is downloaded."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.peers import randomize, repair_torchvision
from tests.cli.typed import typed
from tests.data.images import class_folders
from tests.loopback_hub import NOBODY, Repositories, read_files, run_python, run_vitral, serve_hub
from vitral import ViTConfig, WeightsError
from vitral.model.cost import count_cost
from vitral.training.request import reopen
from vitral.weights.dialects import plan_load
from vitral.weights.formats.opening import open_state_dict
from vitral.weights.formats.tensor_file import TensorFile
from vitral.weights.hub import locate
from vitral.weights.pretrained import PRETRAINED, Pretrained, recommend
from vitral.weights.state_dict import StateDictBuilder, build_on_meta

# The published config.json, without fields that only training reads.
VIT = dict(hidden_act="gelu", image_size=224, layer_norm_eps=1e-12, num_channels=3, patch_size=16, qkv_bias=True)
DINOV2 = dict(hidden_act="gelu", image_size=518, layer_norm_eps=1e-6, mlp_ratio=4, patch_size=14, use_swiglu_ffn=False)
BASE = dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
LARGE = dict(hidden_size=1024, num_attention_heads=16, num_hidden_layers=24)
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "google/vit-base-patch16-224-in21k": VIT | BASE | dict(intermediate_size=3072),
    "google/vit-large-patch16-224-in21k": VIT | LARGE | dict(intermediate_size=4096),
    "facebook/dinov2-small": DINOV2 | dict(hidden_size=384, num_attention_heads=6, num_hidden_layers=12),
    "facebook/dinov2-base": DINOV2 | BASE,
    "facebook/dinov2-large": DINOV2 | LARGE,
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "google": dict(do_normalize=True, do_resize=True, image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=2, size=224),
    "facebook": dict(
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        resample=3,
        size={"shortest_edge": 256},
    ),
}
ONE_PER_FAMILY = (
    "dinov2-s14",
    "dinov2-reg-s14",
    "augreg-ti16",
    "deit3-s16",
    "vit-b16-in21k",
    "dino-s16",
    "siglip2-b16",
)


def build_peer(row: Pretrained, depth: int | None = None) -> nn.Module:
    """Return the network of a repository as the library that published it builds it."""
    repair_torchvision()
    if row.repository.startswith("timm/"):
        import timm

        changes: dict[str, Any] = {} if depth is None else {"depth": depth}
        return timm.create_model(row.repository.removeprefix("timm/"), **changes)
    from transformers import Dinov2Config, Dinov2Model, ViTModel
    from transformers import ViTConfig as TheirConfig

    fields: dict[str, Any] = TRANSFORMERS[row.repository] | ({} if depth is None else {"num_hidden_layers": depth})
    is_vit = row.repository.startswith("google/")
    return ViTModel(TheirConfig(**fields)) if is_vit else Dinov2Model(Dinov2Config(**fields))


def config_json(peer: nn.Module, folder: Path) -> dict[str, Any]:
    """Return config.json as the library writes it."""
    if hasattr(peer, "pretrained_cfg"):
        from timm.models._hub import save_config_for_hf

        save_config_for_hf(peer, folder / "config.json")  # type: ignore[arg-type]
        return json.loads((folder / "config.json").read_text())
    return peer.config.to_dict()  # type: ignore[union-attr]


def theirs_on_meta(row: Pretrained, folder: Path) -> TensorFile:
    """Return names, shapes and config.json of the whole network, without memory for its parameters."""
    with torch.device("meta"):
        peer = build_peer(row)
    return replace(open_state_dict(peer.state_dict()), sidecars={"config.json": config_json(peer, folder)})


@pytest.mark.parametrize("row", PRETRAINED.values(), ids=lambda row: row.name)
def test_every_row_is_the_network_that_vitral_loads(row: Pretrained, tmp_path: Path) -> None:
    file = theirs_on_meta(row, tmp_path)
    plan = plan_load(file, {})
    model = build_on_meta(plan.spec.config)
    StateDictBuilder(model, plan, {}).check_coverage()  # raises unless file and network cover each other
    config, network = row.config, plan.spec.config
    assert isinstance(network, ViTConfig)
    assert plan.dialect == row.dialect
    assert not plan.warnings
    for field in ("image_hw", "patch_hw", "num_classes", "heads", "registers", "pool", "has_class_token", "table_grid"):
        assert getattr(config, field) == getattr(network, field), field
    assert count_cost(config) == count_cost(network)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert count_cost(config).parameters == parameters
    theirs = sum(np.prod(shape) for name, shape in file.shapes.items() if name not in plan.ignored)
    has_class_row = not row.name.startswith(("deit3", "dinov2-reg"))  # their table has rows for patches only
    assert parameters - theirs == (0 if has_class_row else config.width)


def test_licenses_and_sizes_are_those_that_timm_states() -> None:
    repair_torchvision()
    import timm

    rows = [row for row in PRETRAINED.values() if row.repository.startswith("timm/")]
    assert len(rows) > 10
    for row in rows:
        stated = timm.get_pretrained_cfg(row.repository.removeprefix("timm/"))
        assert stated is not None
        assert (stated.hf_hub_id, stated.license) == (row.repository, row.license)
        assert (stated.input_size[1:], stated.num_classes) == (row.config.image_hw, row.config.num_classes)


# ---- a hub on this machine, with the published layouts at a depth of one block ----


@pytest.fixture(scope="module")
def peers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: randomize(build_peer(PRETRAINED[name], depth=1)).eval() for name in ONE_PER_FAMILY}


@pytest.fixture(scope="module")
def repositories(peers: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    """Return the files as timm and transformers publish them."""
    repositories = {}
    for name, peer in peers.items():
        folder, repository = tmp_path_factory.mktemp("repository"), PRETRAINED[name].repository
        if repository.startswith("timm/"):
            from timm.models._hub import save_for_hf

            save_for_hf(peer, str(folder), safe_serialization=True)
        else:
            peer.save_pretrained(folder)  # type: ignore[operator]
            owner = repository.partition("/")[0]
            (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[owner]))
        repositories[repository] = read_files(folder)
    return repositories


@pytest.fixture(scope="module")
def hub(repositories: Repositories) -> Iterator[str]:
    with serve_hub(repositories) as (endpoint, _):
        yield endpoint


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


LOAD = """
import sys, json, numpy, torch, vitral
folder, names = sys.argv[1], sys.argv[2:]
facts = {}
for name in names:
    checkpoint = vitral.load(name)
    image = torch.from_numpy(numpy.load(f"{folder}/{name}.npy"))
    with torch.inference_mode():
        numpy.save(f"{folder}/{name}-ours.npy", checkpoint.model.features(image).pooled.numpy())
    facts[name] = checkpoint.preprocess.as_dict() | {"dialect": checkpoint.report.dialect}
facts["label"] = vitral.Predictor("augreg-ti16")(numpy.zeros((32, 32, 3), "uint8")).label
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one input per network."""
    folder = tmp_path_factory.mktemp("images")
    for name in ONE_PER_FAMILY:
        np.save(folder / f"{name}.npy", torch.randn(1, 3, *PRETRAINED[name].config.image_hw).numpy())
    return folder


@pytest.fixture(scope="module")
def loaded(hub: str, cache: Path, images: Path) -> subprocess.CompletedProcess[str]:
    """Download every repository by its short name, and compute features."""
    done = run_python("-c", LOAD, str(images), *ONE_PER_FAMILY, cache=cache, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    return done


@torch.inference_mode()
def test_published_layouts_load_by_short_name_with_the_features_of_their_library(
    peers: dict[str, nn.Module], images: Path, loaded: subprocess.CompletedProcess[str]
) -> None:
    facts = json.loads(loaded.stdout)
    for name, peer in peers.items():
        image = torch.from_numpy(np.load(images / f"{name}.npy"))
        if hasattr(peer, "forward_head"):  # timm
            expected = peer.forward_head(peer.forward_features(image), pre_logits=True)  # type: ignore[operator]
        else:
            expected = peer(image).last_hidden_state[:, 0]
        ours = torch.from_numpy(np.load(images / f"{name}-ours.npy"))
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)  # float32 sums in another order
        assert facts[name]["dialect"] == PRETRAINED[name].dialect
        assert f"hf:{PRETRAINED[name].repository}: downloading" in loaded.stderr
    assert facts["dinov2-s14"]["mean"] == [0.485, 0.456, 0.406]
    assert facts["augreg-ti16"]["mean"] == [0.5, 0.5, 0.5]
    assert 0 <= int(facts["label"]) < 1000


def test_the_files_on_disk_have_the_published_names(repositories: Repositories, tmp_path: Path) -> None:
    published = {
        "facebook/dinov2-small": ("encoder.layer.0.attention.attention.query.weight", "embeddings.mask_token"),
        "google/vit-base-patch16-224-in21k": ("encoder.layer.0.layernorm_before.weight", "pooler.dense.weight"),
        "timm/vit_small_patch14_reg4_dinov2.lvd142m": ("reg_token", "blocks.0.ls1.gamma"),
    }
    for repository, names in published.items():
        path = tmp_path / "model.safetensors"
        path.write_bytes(repositories[repository]["model.safetensors"])
        assert set(names) <= set(load_file(path)), repository


@pytest.mark.usefixtures("loaded")
def test_train_from_auto_uses_the_cache_offline_and_a_resume_keeps_the_choice(cache: Path, tmp_path: Path) -> None:
    data = str(class_folders(tmp_path / "images", {"cat": 12, "dog": 12}, size=(32, 32)))
    run = tmp_path / "run"
    options = ("--from", "auto", "--tune", "probe", "--image-size", "28", "--device", "cpu")
    done = run_vitral("train", data, *options, "--out", str(run), cache=cache, HF_ENDPOINT=NOBODY)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "dinov2-s14" in line and "recommended" in line]
    assert "small enough for a CPU: 22 M parameters, 81.1% on ImageNet by linear probe" in line
    assert 'from = "dinov2-s14"' in (run / "config.toml").read_text()
    _, resolved = reopen(run, data, {"from": "auto"})
    assert resolved.from_weights == "dinov2-s14"


# ---- names ----


def test_the_recommendation_depends_on_the_device() -> None:
    assert recommend("cpu")[0] == "dinov2-s14"
    assert recommend("cuda:1")[0] == recommend("mps")[0] == "dinov2-b14"


def test_a_local_path_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dinov2-s14").mkdir()
    assert locate("dinov2-s14") == Path("dinov2-s14")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dinov2-s41", "Did you mean 'dinov2-s14'?"),
        ("Augreg-B_16", "Did you mean 'augreg-b16'?"),
        ("something", "Run `vitral models --pretrained` to list the names of checkpoints."),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(WeightsError, match="not found") as caught:
        locate(name)
    assert caught.value.hint == hint


def test_the_table_as_text_json_and_names() -> None:
    done = typed("models", "--pretrained")
    assert done.returncode == 0
    for row in PRETRAINED.values():
        assert f"{row.name} " in done.stdout
        assert row.hub in done.stdout
        assert row.source.address in done.stdout
    rows = json.loads(typed("models", "--pretrained", "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(PRETRAINED)
    (row,) = [row for row in rows if row["name"] == "augreg-b16"]
    assert (row["parameters"], row["forward_flops"]) == (86_567_656, 35_127_656_448)  # vit-b16 of `vitral models`
    assert row["license"] == "apache-2.0"
    assert row["top1"] == 0.84534


def test_words_and_image_size_select_rows() -> None:
    assert typed("models", "--pretrained", "mae", "--format", "quiet").stdout.split() == ["mae-b16", "mae-l16"]
    assert typed("models", "--pretrained", "by-nc", "--format", "quiet").stdout.split() == ["mae-b16", "mae-l16"]
    smaller = json.loads(
        typed("models", "--pretrained", "dinov2-s14", "--image-size", "224", "--format", "json").stdout
    )
    assert [row["image_size"] for row in smaller] == [[224, 224]]
    omitted = typed("models", "--pretrained", "--image-size", "256")
    assert "6 models omitted: the patch size does not divide this image size." in omitted.stdout
    none = typed("models", "--pretrained", "dinov2", "--image-size", "100")
    assert (none.returncode, "14" in none.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--pretrained", "dinov2-s15"], "Did you mean 'dinov2-s14'?"),
        (["dinov2"], "Pass --pretrained to list published checkpoints."),
    ],
)
def test_words_without_a_row_are_errors(words: list[str], reason: str) -> None:
    done = typed("models", *words)
    assert done.returncode == 2
    assert reason in done.stderr
