"""From a request to a job: networks, splits, sizes, starting from a checkpoint, and a network of one's own."""

import io
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitral
from tests.data.images import class_folders, encoded, photo
from tests.training.short_runs import (
    TINY,
    assert_equal,
    interrupt_at,
    last,
    read_weights,
    train,
    warnings_of,
)
from vitral.model.block import Block
from vitral.model.config import ViTConfig
from vitral.model.packing import Packing
from vitral.training.config import as_resolved
from vitral.training.entry import train_events
from vitral.training.events import Chosen, Event, Finished, Measuring, Started, Stepped
from vitral.training.prepare import build_model, name_model
from vitral.training.settings import with_settings
from vitral.training.tuning import merge_lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(20, 24))


# ---- networks ----


def build(**settings: Any) -> Any:
    requested = {"data": "x", "model": "vit-pico7", "image_size": 28, "channels": 1, "resize": "squash", **settings}
    return build_model(as_resolved(with_settings(None, requested, "test")), classes=3)


@pytest.mark.parametrize("stem", [{"x": 1}, {"kind": "resnet", "x": 1}, {"kind": "conv"}])
def test_stems_that_are_refused(stem: dict[str, Any]) -> None:
    with pytest.raises(vitral.ConfigError, match=r"network\.stem=.*kind='resnet'"):
        build(**{"network.stem": stem})


def test_classification_needs_logits_per_image() -> None:
    with pytest.raises(vitral.ConfigError, match=r"network\.pool=none .*Use token, mean or map"):
        build(**{"network.pool": "none"})


def test_a_bit_has_no_dropout() -> None:
    with pytest.raises(vitral.ConfigError, match="BiT has neither dropout"):
        build(model="bit-r26x1", dropout=0.1)


def test_dropout_belongs_to_the_run() -> None:
    model, preprocess, changes = build(dropout=0.1, drop_path=0.2)
    assert (model.config.dropout, model.config.drop_path, model.config.num_classes) == (0.1, 0.2, 3)
    assert (preprocess.size, preprocess.channels) == ((28, 28), 1)
    assert changes == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model": "ViT-S16"}, "vit-s16"),
        ({"model": "auto", "from": "runs/a.b/model.safetensors"}, "model"),
        ({"model": "auto", "from": "hf:google/vit-base"}, "vit-base"),
        ({"model": "custom:MyViT"}, "MyViT"),
    ],
)
def test_the_name_in_the_run_folder(settings: dict[str, str], expected: str) -> None:
    assert name_model(as_resolved(with_settings(None, {"data": "x", **settings}, "test"))) == expected


# ---- data ----


def write_shard(path: Path, labels: list[int]) -> None:
    with tarfile.open(path, "w") as shard:
        for number, label in enumerate(labels):
            for suffix, content in ((".png", encoded(photo(16, 16, number), "PNG")), (".cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:03d}{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def test_shards_with_one_used_class_are_refused(tmp_path: Path) -> None:
    """Labels 0 to 3 are classes of the index, but only one has images."""
    write_shard(tmp_path / "train-000.tar", [3] * 24)
    with pytest.raises(vitral.DataError, match="1 class.*at least 2"):
        train(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_test_split_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    val = class_folders(tmp_path / "val", {"red": 2, "green": 2, "blue": 2})
    for path in val.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(vitral.DataError, match="None of the 6 images that were tried"):
        train(folder, tmp_path / "run", val=str(val))


def test_softmax_on_multi_label_data_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{index}.png,{'a|b' if index % 2 else 'b'}\n" for index in range(20))
    for index in range(20):
        photo(16, 16, index).save(tmp_path / f"{index}.png")
    (tmp_path / "list.csv").write_text("image,labels\n" + rows)
    with pytest.raises(vitral.ConfigError, match=r"loss\.kind=softmax.*loss\.kind=sigmoid"):
        train(tmp_path / "list.csv", tmp_path / "run", loss=dict(kind="softmax"))
    events = train(tmp_path / "list.csv", tmp_path / "multi", epochs=1)
    assert last(
        (event for event in events if isinstance(event, Chosen) and event.name == "loss.kind"), Chosen
    ).value == ("sigmoid")


# ---- native sizes ----


def test_native_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches mix sizes, in training and in measuring: sides are rounded to the patch of 4, and nothing is resized."""
    data = class_folders(tmp_path / "data", {"red": 16, "green": 16}, size=(20, 12))
    class_folders(tmp_path / "data", {"red": 6}, size=(8, 28))
    seen: dict[bool, set[tuple[tuple[int, ...], ...]]] = {True: set(), False: set()}
    forward = vitral.ViT.forward

    def recording(self: vitral.ViT, images: Any) -> Any:
        shapes = tuple(sorted({tuple(image.shape) for image in images}))
        seen[self.training].add(shapes)
        return forward(self, images)

    monkeypatch.setattr(vitral.ViT, "forward", recording)
    events = train(data, tmp_path / "run", resize="native", epochs=3)
    assert isinstance(events[-1], Finished)
    sizes = {(3, 20, 12), (3, 8, 28)}
    for is_training in (True, False):
        assert {shape for shapes in seen[is_training] for shape in shapes} == sizes
        assert tuple(sorted(sizes)) in seen[is_training]  # both in one batch
    assert vitral.load(tmp_path / "run").preprocess.resize == "native"


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        (dict(mix=dict(mixup=0.2)), "mix .*resize=native.*resize=crop"),
        (dict(mix=dict(cutmix=0.2)), "mix .*resize=native.*resize=crop"),
        (dict(augment=dict(crop="resized")), r"augment\.crop=resized .*resize=native"),
        (dict(augment=dict(crop="inception")), r"augment\.crop=inception .*resize=native"),
    ],
)
def test_native_sizes_exclude_what_resizes(
    folder: Path, tmp_path: Path, settings: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        train(folder, tmp_path / "run", resize="native", **settings)


# ---- length ----


def test_a_warmup_longer_than_the_run_is_reported(folder: Path, tmp_path: Path) -> None:
    events = train(folder, tmp_path / "run", optim=dict(lr=1e-3, warmup_steps=1000))
    assert any("1,000 of 10 steps" in message for message in warnings_of(events))
    single = train(folder, tmp_path / "one", epochs="auto", steps=1)
    assert last(single, Stepped).lr > 0  # a single step trains


# ---- starting from a checkpoint ----


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base")
    train(folder, run / "run")
    vitral.save(vitral.load(run / "run"), run / "base.safetensors")
    return run / "base.safetensors"


@pytest.mark.parametrize("what", ["head", "last-blocks", "lora", "all"])
def test_starting_from_a_checkpoint(folder: Path, base: Path, tmp_path: Path, what: str) -> None:
    settings = {**TINY, "tune": dict(what=what, rank=2, blocks=1), "image_size": (24, 16)}
    for name in ("model", "network"):
        del settings[name]
    list(train_events(folder, out=tmp_path / "run", **{"from": str(base)}, **settings))
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.image_size == (24, 16)
    assert loaded.model.config.table_grid == (6, 4)
    if what == "all":
        assert not (tmp_path / "run" / "adapter.safetensors").exists()
        return
    size = (tmp_path / "run" / "adapter.safetensors").stat().st_size
    assert size < 0.8 * (tmp_path / "run" / "model.safetensors").stat().st_size
    start = vitral.load(base, image_size=(24, 16), num_classes=3, representation=None)
    adapted = merge_lora({**start.model.state_dict(), **load_file(tmp_path / "run" / "adapter.safetensors")})
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(adapted[name], tensor, atol=1e-6, rtol=0)


def test_a_damaged_checkpoint_is_refused(folder: Path, base: Path, tmp_path: Path) -> None:
    content = bytearray(base.read_bytes())
    content[-5] ^= 64
    (tmp_path / "damaged.safetensors").write_bytes(content)
    with pytest.raises(vitral.WeightsError, match=r"damaged\.safetensors .*SHA-256"):
        list(train_events(folder, out=tmp_path / "run", **{"from": str(tmp_path / "damaged.safetensors")}))
    assert not (tmp_path / "run").exists()


# ---- a network of one's own ----


class GatedBlock(Block):
    """A block with a gate that no checkpoint of vitral knows."""

    def __init__(self, config: ViTConfig, index: int):
        super().__init__(config, index)
        self.gate = nn.Parameter(torch.full((config.width,), 0.5))

    def forward(self, x: Tensor, packing: Packing, record: bool = True) -> Tensor:
        return x + self.gate * (super().forward(x, packing, record) - x)


class GatedViT(vitral.ViT):
    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(GatedBlock(config, index) for index in range(config.blocks))


OWN: dict[str, Any] = {name: value for name, value in TINY.items() if name not in ("model", "network", "image_size")}


def gated(**fields: Any) -> GatedViT:
    torch.manual_seed(0)
    sizes = dict(width=48, depth=2, heads=3, mlp_width=96, patch_size=4, image_size=16, num_classes=3)
    return GatedViT(ViTConfig(**{**sizes, **fields}))


@pytest.mark.parametrize("num_classes", [3, 7])
def test_a_network_of_your_own(folder: Path, tmp_path: Path, num_classes: int) -> None:
    """It trains with its head for the classes of the data, and its run holds its state dict."""
    network = gated(num_classes=num_classes)
    events = list(vitral.train_events(folder, out=tmp_path / "run", model=network, **{**OWN, "epochs": 6}))
    finished = last(events, Finished)
    assert finished.test["top1"] > 0.9
    assert network.config.num_classes == 3
    saved = read_weights(tmp_path / "run")
    assert saved.keys() == network.state_dict().keys()
    assert (saved["blocks.1.gate"] != 0.5).any()
    assert_equal(saved, {name: tensor.detach() for name, tensor in network.state_dict().items()})
    assert (tmp_path / "run" / "report.html").is_file()
    with pytest.raises(vitral.WeightsError):  # only its class can load it
        vitral.load(tmp_path / "run")


def test_a_network_of_your_own_resumes_when_it_is_passed_again(folder: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(train_events(folder, out=whole, model=gated(), **OWN))
    interrupt_at(7, train_events(folder, out=parts, model=gated(), **OWN))
    with pytest.raises(vitral.ConfigError, match=r"GatedViT.*resume=\.\.\., model=network"):
        list(train_events(resume=parts))
    with pytest.raises(vitral.ConfigError, match="custom:GatedViT.*got 'custom:ViT'"):
        list(train_events(resume=parts, model=vitral.ViT(gated().config)))
    events = list(train_events(resume=parts, model=gated()))
    assert last(events, Started).step == 7
    assert_equal(read_weights(whole), read_weights(parts))


def interrupt_test(events: Any) -> Event:
    event = None
    for event in events:
        if isinstance(event, Measuring) and event.what == "test":
            signal.raise_signal(signal.SIGINT)
    assert event is not None
    return event


def test_a_network_of_your_own_keeps_its_best_epoch(folder: Path, tmp_path: Path) -> None:
    """The test scores are those of the kept weights, also after a resume during the test."""
    settings: dict[str, Any] = {**OWN, "epochs": 4, "optim": dict(lr=0.05, schedule="constant")}
    whole = last(train_events(folder, out=tmp_path / "whole", model=gated(), **settings), Finished)
    interrupt_test(train_events(folder, out=tmp_path / "parts", model=gated(), **settings))
    parts = last(train_events(resume=tmp_path / "parts", model=gated()), Finished)
    assert (whole.best_step, whole.test["loss"]) == (parts.best_step, parts.test["loss"])


@pytest.mark.parametrize("tune", [{}, {"what": "lora", "rank": 2}])
def test_a_plain_network_becomes_an_ordinary_checkpoint(folder: Path, tmp_path: Path, tune: dict[str, Any]) -> None:
    fields = dict(width=48, depth=2, heads=3, mlp_width=96, image_size=16)
    network = vitral.create("vit-pico4", num_classes=3, **fields)
    events = list(train_events(folder, out=tmp_path / "run", model=network, tune=tune, **OWN))
    assert isinstance(events[-1], Finished)
    loaded = vitral.load(tmp_path / "run")
    assert loaded.labels == ("blue", "green", "red")
    assert loaded.model.config.width == 48
    if not tune:
        assert_equal(read_weights(tmp_path / "run"), dict(network.state_dict()))


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        (dict(image_size=32), r"\(16, 16\) pixels .*32"),
        (dict(channels=1), "3 channels.*1"),
        (dict(dropout=0.1), "dropout"),
        (dict(network=dict(depth=3)), "network"),
        ({"from": "x.safetensors"}, "both name a network"),
    ],
)
def test_settings_that_contradict_a_network_of_your_own(
    folder: Path, tmp_path: Path, settings: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        list(train_events(folder, out=tmp_path / "run", model=gated(), **{**OWN, **settings}))
