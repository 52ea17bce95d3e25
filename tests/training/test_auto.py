"""The automatic choices: every branch, each with a reason, and never against an explicit setting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vitral
from vitral.data.dataset import DatasetIndex, FileSource, Item
from vitral.data.headers import Header
from vitral.devices import Choice
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.sizes import named_config
from vitral.preprocess import Preprocess, Resize
from vitral.training import auto
from vitral.training.auto import Facts, resolve, typical_side
from vitral.training.config import ResolvedConfig
from vitral.training.events import Chosen
from vitral.training.settings import as_settings, with_settings


@dataclass(frozen=True)
class FakeCheckpoint:
    config: ViTConfig | BiTConfig
    preprocess: Preprocess


def checkpoint(
    *, image_size: int = 96, channels: int = 3, resize: Resize = "pad", bit: bool = False, **fields: Any
) -> FakeCheckpoint:
    fields |= dict(image_size=image_size, channels=channels, num_classes=5)
    config = named_config("bit-r26x1" if bit else "vit-s16", **fields)
    preprocess = Preprocess(size=(image_size, image_size), resize=resize).with_channels(channels)
    return FakeCheckpoint(config, preprocess)


def make_header(height: int, width: int | None = None, bands: int = 3) -> Header:
    return Header(format="PNG", height=height, width=width or height, mode="RGB", bands=bands)


def make_facts(
    *,
    images: int = 100,
    classes: int = 2,
    side: int = 28,
    bands: Sequence[int] = (3,),
    pretrained: FakeCheckpoint | None = None,
    multi_label: bool = False,
    labels: Sequence[int] | None = None,
) -> Facts:
    labels = [index % classes for index in range(images)] if labels is None else labels
    items = tuple(
        Item(f"{index}.png", (label,) if multi_label else label, FileSource("")) for index, label in enumerate(labels)
    )
    names = tuple(f"class {number}" for number in range(classes))
    return Facts(
        dataset=DatasetIndex(name="data", classes=names, splits={"train": items}, multi_label=multi_label),
        train=items,
        headers=[make_header(side, 2 * side, bands=count) for count in bands],
        pretrained=pretrained,
    )


def choose(facts: Facts | None = None, **requested: Any) -> tuple[ResolvedConfig, dict[str, Chosen]]:
    """Resolve settings on a CPU and return the config, and the choices by name."""
    requested = {"data": "x", "device": "cpu", **{name.replace("__", "."): value for name, value in requested.items()}}
    config, choices = resolve(with_settings(None, requested, "test"), facts or make_facts())
    assert all(choice.reason.strip() for choice in choices)
    by_name = {choice.name: choice for choice in choices}
    assert len(by_name) == len(choices)  # each setting is chosen once
    for name, choice in by_name.items():
        assert as_settings(config)[name] == choice.value
    return config, by_name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and 12 cores."""
    monkeypatch.setattr(auto, "choose_device", lambda device: Choice("cuda" if device == "auto" else device, "a GPU"))
    monkeypatch.setattr(auto, "choose_precision", lambda _: Choice("bfloat16", "native on this GPU"))
    monkeypatch.setattr(auto, "count_cores", lambda: 12)


# ---- hardware ----


def test_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "choose_device", lambda _: Choice("cpu", "found no GPU"))
    monkeypatch.setattr(auto, "choose_precision", lambda _: Choice("float32", "no native bfloat16"))
    config, choices = choose(device="auto")
    assert (config.device, config.precision, config.workers) == ("cpu", "float32", 0)
    assert choices["device"].reason == "found no GPU"
    assert choices["precision"].reason == "no native bfloat16"
    assert "threads load the next batch" in choices["workers"].reason


def test_bfloat16_on_a_cpu_is_for_wide_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "choose_precision", lambda _: Choice("bfloat16", "native on this CPU"))
    for wide in ({"model": "vit-ti16", "image_size": 32}, {"model": "vit-nano4", "image_size": 32}):
        config, choices = choose(**wide)
        assert config.precision == "bfloat16"
        assert choices["precision"].reason == "native on this CPU"
    config, choices = choose(model="vit-pico7", image_size=28)
    assert config.precision == "float32"
    assert choices["precision"].reason == "a network 96 wide gains nothing from bfloat16 on a CPU"
    config, _ = choose(make_facts(pretrained=checkpoint()), **{"from": "x"})
    assert config.precision == ("bfloat16" if checkpoint().config.width >= 128 else "float32")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (9, 8), (64, 8)])
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(auto, "count_cores", lambda: cores)
    config, choices = choose(device="auto")
    assert (config.device, config.precision, config.workers) == ("cuda", "bfloat16", workers)
    assert choices["device"].reason == "a GPU"
    assert f"{cores} cores" in choices["workers"].reason


def test_explicit_hardware_is_no_choice() -> None:
    config, choices = choose(precision="float16", workers=3)
    assert (config.device, config.precision, config.workers) == ("cpu", "float16", 3)
    assert not {"device", "precision", "workers"} & set(choices)


def test_cores_of_this_machine() -> None:
    assert 1 <= auto.count_cores() < 10_000


# ---- input ----


@pytest.mark.parametrize(
    ("bands", "channels", "fragment"),
    [
        ((1, 1), 1, "gray"),
        ((3, 3), 3, "colors"),
        ((1, 3, 1), 3, "colors"),  # gray images become RGB beside colored ones
        ((5, 5), 5, "5 channels"),
    ],
)
def test_channels_of_the_images(bands: tuple[int, ...], channels: int, fragment: str) -> None:
    config, choices = choose(make_facts(bands=bands))
    assert config.channels == channels
    assert fragment in choices["channels"].reason


@pytest.mark.parametrize(
    ("bands", "of_checkpoint", "expected"),
    [(1, 3, 3), (3, 1, 1), (3, 3, 3), (5, 5, 5), (5, 3, 5), (3, 5, 3), (1, 5, 1)],
)
def test_channels_of_a_checkpoint(bands: int, of_checkpoint: int, expected: int) -> None:
    """Gray and RGB convert into each other; otherwise the images decide."""
    facts = make_facts(bands=(bands,), pretrained=checkpoint(channels=of_checkpoint))
    config, choices = choose(facts, **{"from": "x"})
    assert config.channels == expected
    assert ("checkpoint" in choices["channels"].reason) == (expected == of_checkpoint)


@pytest.mark.parametrize(
    ("side", "size"), [(8, 28), (28, 28), (31, 32), (48, 32), (49, 64), (64, 64), (80, 64), (81, 128), (500, 128)]
)
def test_image_size_on_a_cpu(side: int, size: int) -> None:
    config, choices = choose(make_facts(side=side))
    assert config.image_size == size
    assert f"{side} pixels" in choices["image_size"].reason
    assert ("CPU" in choices["image_size"].reason) == (size == 128)


@pytest.mark.parametrize(
    ("model", "network", "side", "size"),
    [
        ("vit-nano7", {}, 500, 126),
        ("vit-h14", {}, 500, 126),
        ("vit-ti16", {}, 28, 32),
        ("vit-ti16", {}, 500, 128),
        ("vit-b32", {}, 8, 32),
        ("vit-ti16", {"patch_size": 10}, 500, 130),
        ("bit-r50x1", {}, 500, 128),
    ],
)
def test_image_size_fits_the_patches_of_a_named_model(model: str, network: Any, side: int, size: int) -> None:
    config, choices = choose(make_facts(side=side), model=model, network=network)
    assert config.image_size == size
    assert ("multiple of its patches" in choices["image_size"].reason) == (size not in (28, 128))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("side", "size"), [(80, 64), (81, 224), (500, 224)])
def test_image_size_on_a_gpu(side: int, size: int) -> None:
    assert choose(make_facts(side=side), device="auto")[0].image_size == size


@pytest.mark.parametrize(("side", "resize"), [(80, "squash"), (81, "crop")])
def test_resize(side: int, resize: str) -> None:
    assert choose(make_facts(side=side))[0].resize == resize


def test_size_and_resize_of_a_checkpoint() -> None:
    config, choices = choose(make_facts(pretrained=checkpoint(image_size=96, resize="pad")), **{"from": "x"})
    assert (config.image_size, config.resize) == (96, "pad")
    assert "checkpoint" in choices["image_size"].reason
    assert "checkpoint" in choices["resize"].reason


def test_the_typical_side_is_the_median_of_short_sides() -> None:
    assert typical_side([make_header(10, 99), make_header(99, 30), make_header(1000, 2000)]) == 30
    with pytest.raises(vitral.ConfigError, match="can be read.*vitral data"):
        typical_side([])


# ---- network ----


@pytest.mark.parametrize(
    ("size", "model"),
    [
        (28, "vit-pico7"),
        (56, "vit-pico7"),
        (32, "vit-pico4"),
        (40, "vit-pico4"),
        (64, "vit-pico8"),
        ((32, 64), "vit-pico4"),
        ((64, 64), "vit-pico8"),
        (128, "vit-ti16"),
    ],
)
def test_model_on_a_cpu(size: Any, model: str) -> None:
    config, choices = choose(image_size=size)
    assert config.model == choices["model"].value == model


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("images", [4999, 5000])
def test_model_on_a_gpu(images: int) -> None:
    config, choices = choose(make_facts(side=200, images=images), device="auto")
    assert config.model == "vit-s16"
    assert ("--from" in choices["model"].reason) == (images < 5000)


def test_no_model_is_chosen_beside_a_checkpoint_or_a_name() -> None:
    config, choices = choose(make_facts(pretrained=checkpoint()), **{"from": "x"})
    assert (config.model, config.from_weights) == ("auto", "x")
    assert "model" not in choices
    config, choices = choose(model="vit-b16")
    assert config.model == "vit-b16"
    assert "model" not in choices


# ---- tuning ----


@pytest.mark.parametrize(
    ("images", "bit", "expected"),
    [(18, False, "last-blocks"), (2000, False, "last-blocks"), (18, True, "all"), (2000, True, "all")],
)
def test_tuning_on_a_cpu(images: int, bit: bool, expected: str) -> None:
    config, choices = choose(make_facts(images=images, pretrained=checkpoint(bit=bit)), **{"from": "x"})
    assert config.tune.what == choices["tune.what"].value == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("images", "expected"), [(18, "last-blocks"), (1998, "last-blocks"), (2000, "all")])
def test_tuning_on_a_gpu(images: int, expected: str) -> None:
    config, choices = choose(make_facts(images=images, pretrained=checkpoint()), device="auto", **{"from": "x"})
    assert config.tune.what == expected
    assert f"{images // 2} images per class" in choices["tune.what"].reason


def test_a_probe_alone_without_validation_images() -> None:
    facts = replace(make_facts(images=4, pretrained=checkpoint()), has_validation=False)
    config, choices = choose(facts, **{"from": "x"})
    assert (config.tune.what, config.epochs) == ("probe", 0)
    assert "too few images" in choices["tune.what"].reason


@pytest.mark.parametrize(("depth", "blocks"), [(12, 4), (24, 8), (1, 1)])
def test_a_third_of_the_blocks(depth: int, blocks: int) -> None:
    config, _ = choose(make_facts(pretrained=checkpoint(depth=depth)), **{"from": "x"})
    assert (config.tune.what, config.tune.blocks) == ("last-blocks", blocks)


@pytest.mark.parametrize(("size", "expected"), [(518, 224), (384, 224), (224, 224), (112, 112)])
def test_large_checkpoints_are_used_at_224_pixels(size: int, expected: int) -> None:
    facts = make_facts(pretrained=checkpoint(image_size=size, patch_size=14 if size == 518 else 16))
    config, _ = choose(facts, **{"from": "x"})
    assert config.image_size == expected


def test_everything_is_trained_from_scratch_and_without_labels() -> None:
    assert choose(make_facts(images=4))[0].tune.what == "all"
    unlabeled = make_facts(images=4, classes=0, labels=[-1] * 4, pretrained=checkpoint())
    config, choices = choose(unlabeled, objective="masked-patches", **{"from": "x"})
    assert config.tune.what == "all"
    assert "without labels" in choices["tune.what"].reason


# ---- length ----


@pytest.mark.parametrize(
    ("images", "size"), [(10, 16), (639, 16), (640, 32), (1279, 32), (1280, 64), (2560, 128), (5120, 128)]
)
def test_batch_size_on_a_cpu(images: int, size: int) -> None:
    config, choices = choose(make_facts(images=images))
    assert config.batch_size == size
    assert f"{images:,} images" in choices["batch_size"].reason
    assert ("small" in choices["batch_size"].reason) == (size == 16)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("images", "size"), [(639, 16), (5119, 128), (5120, 256), (10_240, 512), (20_480, 512)])
def test_batch_size_on_a_gpu(images: int, size: int) -> None:
    assert choose(make_facts(images=images), device="auto")[0].batch_size == size


@pytest.mark.parametrize(("accumulate", "size"), [(1, 16), (3, 15), (4, 16), (40, 40)])
def test_batch_size_is_a_multiple_of_accumulate(accumulate: int, size: int) -> None:
    assert choose(accumulate=accumulate)[0].batch_size == size


@pytest.mark.parametrize(
    ("images", "batch_size", "start", "epochs", "warmup"),
    [
        (1600, 16, "scratch", 40, 200),  # 4000 steps of 100 per epoch
        (1600, 16, "checkpoint", 6, 30),  # 600 steps
        (16, 16, "scratch", 200, 10),  # at most 200 epochs
        (1600, 1, "scratch", 3, 240),  # at least 3
        (1600, 1, "checkpoint", 3, 240),
        (5, 16, "scratch", 200, 10),  # fewer than a batch: one step per epoch
    ],
)
def test_epochs_and_warmup(images: int, batch_size: int, start: str, epochs: int, warmup: int) -> None:
    facts = make_facts(images=images, pretrained=checkpoint() if start == "checkpoint" else None)
    origin = {"from": "x"} if start == "checkpoint" else {}
    config, choices = choose(facts, batch_size=batch_size, **origin)
    assert (config.epochs, config.optim.warmup_steps) == (epochs, warmup)
    assert f"about {epochs * max(1, images // batch_size)} steps" in choices["epochs"].reason
    assert choices["optim.warmup_steps"].reason == "5% of all steps"


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (50, 2), (60, 3), (1000, 50)])
def test_steps_become_epochs(steps: int, warmup: int) -> None:
    config, choices = choose(make_facts(images=1600), batch_size=16, steps=steps)
    assert config.epochs == steps / 100
    assert config.steps == steps
    assert config.optim.warmup_steps == warmup  # never all of the steps
    assert f"{steps} steps, 100 per epoch" in choices["epochs"].reason


def test_explicit_epochs_and_warmup() -> None:
    config, choices = choose(make_facts(images=1600), batch_size=16, epochs=2)
    assert (config.epochs, config.optim.warmup_steps) == (2, 10)
    assert "epochs" not in choices
    config, choices = choose(make_facts(images=1600), batch_size=16, optim__warmup_steps=7)
    assert (config.epochs, config.optim.warmup_steps) == (40, 7)
    assert "optim.warmup_steps" not in choices


def test_a_time_budget_is_planned_later() -> None:
    config, choices = choose(minutes=5)
    assert (config.epochs, config.optim.warmup_steps) == ("auto", "auto")
    assert not {"epochs", "optim.warmup_steps"} & set(choices)


# ---- learning rates ----

LEARNING_RATES = {
    "sgd": (0.03, 0.01, 0.03, 0.01),
    "adamw": (1e-3, 3e-4, 1e-3, 1.2e-4),
    "muon": (2e-3, 1e-4, 1e-3, 1e-4),
}


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
def test_learning_rates(optimizer: str) -> None:
    """From scratch, all weights of a checkpoint, its LoRA, its last blocks."""
    facts, origin = make_facts(pretrained=checkpoint()), {"from": "x"}
    scratch, choices = choose(optim__name=optimizer)
    assert optimizer in choices["optim.lr"].reason
    whole, choices = choose(facts, optim__name=optimizer, tune__what="all", **origin)
    assert optimizer in choices["optim.lr"].reason
    few, choices = choose(facts, optim__name=optimizer, tune__what="lora", **origin)
    assert "lora" in choices["optim.lr"].reason
    blocks, _ = choose(facts, optim__name=optimizer, tune__what="last-blocks", **origin)
    rates = tuple(config.optim.lr for config in (scratch, whole, few, blocks))
    assert rates == LEARNING_RATES[optimizer]


@pytest.mark.parametrize(
    ("what", "bit", "expected"), [("all", False, 0.75), ("all", True, 1.0), ("lora", False, 1.0), ("head", False, 1.0)]
)
def test_layer_decay(what: str, bit: bool, expected: float) -> None:
    facts = make_facts(pretrained=checkpoint(bit=bit))
    config, choices = choose(facts, tune__what=what, **{"from": "x"})
    assert config.optim.layer_decay == expected
    assert ("optim.layer_decay" in choices) == (expected != 1)  # 1 goes without saying


def test_layer_decay_from_scratch() -> None:
    assert choose()[0].optim.layer_decay == 1.0
    facts = make_facts(pretrained=checkpoint())  # a network of the caller's own has no trained weights
    config, _ = choose(facts, model="custom:Own")
    assert (config.optim.layer_decay, config.optim.lr, config.tune.what) == (1.0, 1e-3, "all")


# ---- loss ----


def test_loss_by_the_labels() -> None:
    config, choices = choose()
    assert config.loss.kind == "softmax"
    assert "loss.kind" not in choices
    config, choices = choose(make_facts(multi_label=True))
    assert config.loss.kind == "sigmoid"
    assert "several labels" in choices["loss.kind"].reason
    assert choose(loss__kind="sigmoid")[0].loss.kind == "sigmoid"


def test_softmax_needs_one_label_per_image() -> None:
    with pytest.raises(vitral.ConfigError, match=r"loss\.kind=softmax .*Use loss\.kind=sigmoid"):
        choose(make_facts(multi_label=True), loss__kind="softmax")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0] * 30 + [1] * 10, "none"),  # three times as many is not yet imbalanced
        ([0] * 31 + [1] * 10, "balanced"),
        ([0] * 10 + [1] * 10 + [2] * 31, "balanced"),
        ([0] * 10 + [2] * 10, "none"),  # a class without training images does not count
    ],
)
def test_class_weights(labels: list[int], expected: str) -> None:
    config, choices = choose(make_facts(classes=3, labels=labels))
    assert config.loss.class_weights == expected
    assert ("3 times" in choices["loss.class_weights"].reason) == (expected == "balanced")


def test_class_weights_of_other_data() -> None:
    imbalanced = [0] * 90 + [1] * 10
    assert choose(make_facts(labels=imbalanced, multi_label=True))[0].loss.class_weights == "none"
    unlabeled = make_facts(classes=0, labels=[-1] * 30)
    config, choices = choose(unlabeled, objective="masked-patches")
    assert config.loss.class_weights == "none"
    assert "loss.class_weights" not in choices


# ---- all choices together ----

EXPLICIT: dict[str, st.SearchStrategy[Any]] = {
    "precision": st.sampled_from(["float32", "bfloat16", "float16"]),
    "workers": st.integers(0, 8),
    "channels": st.integers(1, 6),
    "image_size": st.one_of(st.integers(16, 400), st.tuples(st.integers(16, 400), st.integers(16, 400))),
    "resize": st.sampled_from(["squash", "crop", "pad", "native"]),
    "model": st.sampled_from(["vit-pico7", "vit-s16", "bit-r26x1"]),
    "tune.what": st.sampled_from(["all", "head", "last-blocks", "lora"]),
    "batch_size": st.integers(1, 2000),
    "optim.name": st.sampled_from(["sgd", "adamw", "muon"]),
    "optim.lr": st.floats(1e-6, 1.0),
    "optim.layer_decay": st.floats(0.1, 1.0),
    "optim.warmup_steps": st.integers(0, 500),
    "loss.kind": st.just("sigmoid"),
    "loss.class_weights": st.sampled_from(["none", "balanced"]),
}
LENGTHS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.just({}),
    st.fixed_dictionaries({"epochs": st.floats(0.01, 500)}),
    st.fixed_dictionaries({"steps": st.integers(1, 10_000)}),
    st.fixed_dictionaries({"minutes": st.floats(0.1, 100)}),
]


@st.composite
def all_facts(draw: st.DrawFn) -> Facts:
    pretrained = draw(st.sampled_from([None, checkpoint(), checkpoint(channels=1), checkpoint(bit=True)]))
    return make_facts(
        images=draw(st.integers(1, 300)),
        classes=draw(st.integers(1, 12)),
        side=draw(st.integers(1, 400)),
        bands=draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        multi_label=draw(st.booleans()),
        pretrained=pretrained,
    )


@settings(max_examples=80, deadline=None)
@given(
    facts=all_facts(),
    explicit=st.fixed_dictionaries({}, optional=EXPLICIT),
    length=st.one_of(LENGTHS),
)
def test_every_choice_is_made_and_no_explicit_setting_is_overridden(
    facts: Facts, explicit: dict[str, Any], length: dict[str, Any]
) -> None:
    requested = {**explicit, **length, "data": "x", "device": "cpu"}
    if facts.pretrained is not None:
        requested = {name: value for name, value in requested.items() if name != "model"} | {"from": "x"}
    config, choices = resolve(with_settings(None, requested, "test"), facts)
    resolved = as_settings(config)
    for name, value in requested.items():
        assert resolved[name] == value
    chosen = {choice.name for choice in choices}
    assert not chosen & set(requested)
    assert all(choice.reason.strip() for choice in choices)
    undecided = {name for name, value in resolved.items() if value == "auto"}
    allowed = {"model"} if facts.pretrained is not None else set()  # the checkpoint defines the network
    allowed |= {"epochs", "optim.warmup_steps"} if "minutes" in length else set()
    assert undecided <= allowed
    assert ("epochs" in undecided) == ("minutes" in length)
