"""Tokens of the frozen blocks: the numbers of the whole network, the same run after a kill, a file that is verified."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders
from tests.training.short_runs import assert_same_run, interrupt_at, last
from vitral.cache import cache_folder
from vitral.data.augment import Augment
from vitral.data.dataset import FileSource
from vitral.data.randomness import random_generator
from vitral.data.sources import open_dataset
from vitral.evaluation.metrics import fit_temperature
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import make_loader
from vitral.training import token_views, tokens
from vitral.training.entry import train_events
from vitral.training.events import Candidate, Chosen, Event, Finished, Measuring, Stepped
from vitral.training.token_loader import TokenLoader, choose_tokens
from vitral.training.token_views import TokenPlan
from vitral.training.tokens import TokenSet, compute_tokens, count_patches, restore_tokens
from vitral.weights.checkpoint import Checkpoint

CLASSES = ("blue", "green", "red")
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "workers": 0,
    "device": "cpu",
    "precision": "float32",
    "tune": {"what": "last-blocks", "blocks": 1},
    "near_duplicates": "ignore",
}


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("colors"), dict.fromkeys(CLASSES, 30), size=(16, 16))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    vitral.save(small_model(), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))


def finish(progress: Any) -> Any:
    while True:
        try:
            next(progress)
        except StopIteration as end:
            return end.value


def make_model(**fields: Any) -> LoadedModel:
    model = small_model(num_classes=3, **fields)
    torch.nn.init.normal_(model.head.weight)
    return load_model(Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16)), labels=CLASSES))


def make_plan(views: int, images: int, patches: int = 16) -> TokenPlan:
    augment = Augment(crop="resized", flip=0.5)
    return TokenPlan(trained=1, views=views, viewed=images, view_patches=patches, augment=augment, seed=0)


@pytest.mark.parametrize("fields", [{}, {"registers": 2}, {"pool": "mean"}, {"position_at": "every-layer"}])
def test_upper_blocks_on_tokens_equal_the_whole_network(colors: Path, fields: dict[str, Any]) -> None:
    model, items = make_model(**fields), open_dataset(colors).splits["train"][::9]
    tokens, features = finish(compute_tokens(model, items, make_plan(1, len(items))))
    assert isinstance(tokens, TokenSet)
    block = len(model.model.blocks) - 1
    loader = TokenLoader(images=tokens, rows=torch.arange(len(tokens)), batch_size=4)
    upper = torch.cat([model.features_from(block, batch.images) for batch in loader.epoch()])
    torch.testing.assert_close(upper, features, atol=0.03, rtol=0.03)  # bfloat16 keeps 8 bits
    assert tokens.labels.tolist() == [item.label for item in items]


def test_views_are_plain_mirrored_and_augmented(colors: Path) -> None:
    model, items = make_model(), open_dataset(colors).splits["train"][:6]
    tokens, features = finish(compute_tokens(model, items, make_plan(3, 4)))
    assert len(features) == len(tokens.tokens) == 6
    assert tokens.views.shape[:2] == (2, 4)  # the last two images have the plain view only
    plain, _ = finish(compute_tokens(model, items, make_plan(1, 6)))
    assert torch.equal(tokens.tokens, plain.tokens)
    assert not len(plain.views)
    assert not torch.equal(tokens.views[1], tokens.tokens[:4])


def test_a_mirrored_view_has_the_tokens_of_the_mirrored_image(colors: Path) -> None:
    model, items = make_model(), open_dataset(colors).splits["train"][:4]
    tokens, _ = finish(compute_tokens(model, items, make_plan(2, 4)))
    (batch,) = make_loader(model, items).epoch()
    assert isinstance(batch.images, torch.Tensor)
    mirrored, _ = model.tokens(batch.images.flip(-1), -2)
    assert torch.equal(tokens.views[0], mirrored)


def test_views_with_fewer_patches_run_the_blocks_on_those_alone(colors: Path) -> None:
    """A view keeps the class token and the patches that its random numbers choose, whatever the batch."""
    model, items = make_model(), open_dataset(colors).splits["train"][:5]
    tokens, _ = finish(compute_tokens(model, items, make_plan(2, 5, patches=6)))
    assert tokens.views.shape[2] == 1 + 6
    (batch,) = make_loader(model, items).epoch()
    assert isinstance(batch.images, torch.Tensor)
    for row in range(5):
        kept = choose_tokens(random_generator(0, 1, row), patches=16, kept=6, extras=1)
        assert kept[0] == 0
        alone = model.lower_tokens(batch.images[row : row + 1].flip(-1), len(model.model.blocks) - 1, kept[None])
        torch.testing.assert_close(tokens.views[0, row], alone[0], atol=0.02, rtol=0.02)  # bfloat16, another batch


@pytest.mark.parametrize(
    ("fields", "dropped", "expected"),
    [
        ({}, 2 / 3, (48, 72)),
        ({}, 0.0, (144, 144)),
        ({}, 0.9, (48, 72)),  # never fewer than 48
        ({"image_size": 8 * 4}, 0.5, (48, 64)),
        ({"image_size": 4 * 4}, 0.5, (16, 16)),
        ({"position": "relative"}, 0.5, (144, 144)),
        ({"position_at": "every-layer"}, 0.5, (144, 144)),
        ({"attention": "axial"}, 0.5, (144, 144)),
    ],
)
def test_count_patches(fields: dict[str, Any], dropped: float, expected: tuple[int, int]) -> None:
    config = small_model(**{"image_size": 12 * 4, "patch_size": 4, **fields}).config
    assert count_patches(config, dropped) == expected


def test_a_training_epoch_is_repeatable_and_drops_patches(colors: Path) -> None:
    model, items = make_model(), open_dataset(colors).splits["train"][:12]
    tokens, _ = finish(compute_tokens(model, items, make_plan(2, 12, patches=9)))
    loader = TokenLoader(images=tokens, rows=torch.arange(12), batch_size=5, shuffle=True, extras=1, patches=6)
    assert loader.batches_per_epoch == 2
    first, again, other = ([batch.images for batch in loader.epoch(epoch)] for epoch in (0, 0, 1))
    assert first[0].shape[1] == 1 + 6
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    (resumed,) = [batch.images for batch in loader.epoch(0, start=1)]
    assert torch.equal(resumed, first[1])


def test_tokens_are_read_from_an_intact_file_only(colors: Path) -> None:
    model, items = make_model(), open_dataset(colors).splits["train"][:8]
    plan = make_plan(2, 8)
    tokens, _ = finish(compute_tokens(model, items, plan))
    expected, views = tokens.tokens.clone(), tokens.views.clone()
    progress = list(restore_tokens(model, items, plan))
    assert not progress  # nothing was computed
    with tokens.path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"\xff\x00\xff")
    repaired = finish(restore_tokens(model, items, plan))
    assert torch.equal(repaired.tokens, expected)
    assert torch.equal(repaired.views, views)
    repaired.remove()
    assert not list((cache_folder() / "tokens").iterdir())
    assert torch.equal(finish(restore_tokens(model, items, plan)).tokens, expected)


def watch_batches(monkeypatch: pytest.MonkeyPatch, *, stop: int = -1) -> list[int]:
    """Return a list that grows by the size of each batch that is computed; Ctrl-C comes with batch `stop`."""
    sizes: list[int] = []

    def watched(function: Any) -> Any:
        def compute(model: LoadedModel, images: torch.Tensor, *rest: Any) -> Any:
            sizes.append(len(images))
            if len(sizes) == stop:
                raise KeyboardInterrupt
            return function(model, images, *rest)

        return compute

    for name in ("tokens", "lower_tokens"):
        monkeypatch.setattr(LoadedModel, name, watched(getattr(LoadedModel, name)))
    return sizes


@pytest.mark.parametrize(("stop", "images"), [(2, 18), (4, 15), (8, 6), (10, 2)])
def test_a_killed_pass_continues_after_its_last_chunk(
    colors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, images: int
) -> None:
    """Two views in chunks of four images. One of ten is unreadable, so rows are not positions."""
    monkeypatch.setattr(token_views, "BATCH", 2)
    for module in (tokens, token_views):
        monkeypatch.setattr(module, "CHUNK", 4)
    (tmp_path / "bad.png").write_bytes(b"no image")
    items = [*open_dataset(colors).splits["train"][:10]]
    items[3] = replace(items[3], source=FileSource(path=str(tmp_path / "bad.png")))
    model, plan = make_model(), make_plan(2, 10)
    whole, features = finish(compute_tokens(model, items, plan))
    expected, views = whole.tokens.clone(), whole.views.clone()
    whole.remove()
    with monkeypatch.context() as patch:
        watch_batches(patch, stop=stop)
        with pytest.raises(KeyboardInterrupt):
            finish(compute_tokens(model, items, plan))
    sizes = watch_batches(monkeypatch)
    again, same = finish(compute_tokens(model, items, plan))
    assert sum(sizes) == images
    assert (whole.computed, again.computed < 1) == (1, images < 18)
    assert torch.equal(again.tokens, expected)
    assert torch.equal(again.views, views)
    assert torch.equal(same, features)
    assert again.labels.tolist() == whole.labels.tolist()
    assert again.unreadable == whole.unreadable != ()
    again.remove()
    assert not list((cache_folder() / "tokens").iterdir())


def train(data: Path, base: Path, out: Path, **settings: Any) -> list[Event]:
    return list(train_events(data, out=out, **{"from": str(base), **SETTINGS, "epochs": 3, **settings}))


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Stepped)]


@pytest.mark.parametrize(("step", "lose_tokens"), [(4, False), (26, True)])
def test_a_killed_run_resumes_bit_for_bit(
    colors: Path, base: Path, tmp_path: Path, step: int, lose_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted on the training images with the tokens still there, and in the refit without them."""
    monkeypatch.setattr("vitral.training.comparison.choose_model", lambda outputs: (1, "for the test"))
    whole = train(colors, base, tmp_path / "whole")
    assert max(steps_of(whole)) > 26 > 3 * 7  # the refit follows
    settings = {"from": str(base), **SETTINGS, "epochs": 3}
    interrupt_at(step, train_events(colors, out=tmp_path / "parts", **settings))
    files = list((cache_folder() / "tokens").iterdir())
    assert files
    if lose_tokens:
        for path in files:
            path.unlink()
    resumed = list(train_events(resume=tmp_path / "parts"))
    assert min(steps_of(resumed)) == step + 1
    assert (
        bool([event for event in resumed if isinstance(event, Measuring) and event.what == "features"]) == lose_tokens
    )
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert not list((cache_folder() / "tokens").iterdir())  # removed in the end


def test_every_candidate_is_listed_with_the_winner(colors: Path, base: Path, tmp_path: Path) -> None:
    events = train(colors, base, tmp_path / "run")
    names = [event.name for event in events if isinstance(event, Candidate)]
    assert names[-2:] == ["last-blocks, half-way", "last-blocks"] or names[-1].startswith("last-blocks, epoch")
    (choice,) = [event for event in events if isinstance(event, Chosen) and event.name == "model"]
    assert choice.value in ("probe", *names)
    assert isinstance(last(events, Finished), Finished)


def test_dropping_is_for_absolute_positions_only(colors: Path, tmp_path: Path) -> None:
    """Relative positions need the whole grid."""
    vitral.save(small_model(position="relative"), tmp_path / "base.safetensors")
    events = train(colors, tmp_path / "base.safetensors", tmp_path / "run", epochs=1)
    assert isinstance(events[-1], Finished)


def test_the_refitted_model_returns_towards_the_probe(
    colors: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a share of zero nothing of the training is left: the blocks are those of the checkpoint."""
    monkeypatch.setattr("vitral.training.comparison.choose_model", lambda outputs: (1, "for the test"))
    original = vitral.load(base).model.state_dict()
    for share in (0.0, 1.0):
        monkeypatch.setattr("vitral.training.comparison.HALF_WAY", share)
        train(colors, base, tmp_path / f"run-{share}", epochs=2)
        blocks = {
            name: tensor
            for name, tensor in vitral.load(tmp_path / f"run-{share}").model.state_dict().items()
            if name.startswith("blocks.")
        }
        assert all(torch.equal(tensor, original[name]) for name, tensor in blocks.items()) == (share == 0)


def test_probabilities_are_calibrated_on_the_validation_images(
    colors: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of the model are those of training divided by the temperature, also after the refit."""
    monkeypatch.setattr("vitral.training.comparison.choose_model", lambda outputs: (2, "for the test"))
    monkeypatch.setattr("vitral.training.comparison.temperature_of", lambda outputs: 4.0)
    train(colors, base, tmp_path / "cold", epochs=2)
    monkeypatch.setattr("vitral.training.comparison.temperature_of", lambda outputs: 1.0)
    train(colors, base, tmp_path / "plain", epochs=2)
    cold, plain = (vitral.load(tmp_path / name).model.state_dict() for name in ("cold", "plain"))
    for name, tensor in plain.items():
        torch.testing.assert_close(cold[name], tensor / (4 if name.startswith("head.") else 1), rtol=1e-6, atol=0)


def test_few_validation_images_do_not_make_a_model_certain() -> None:
    """Five correct images of five allow a confidence of about six sevenths."""
    logits, labels = torch.eye(3)[[0, 1, 2, 0, 1]] * 2, torch.tensor([0, 1, 2, 0, 1])
    assert (logits / fit_temperature(logits, labels)).softmax(1).max(1).values.min() > 0.999
    calibrated = logits / fit_temperature(logits, labels, smoothing=1 / 7)
    assert calibrated.softmax(1).max(1).values.tolist() == pytest.approx([1 - 1 / 7 * 2 / 3] * 5, abs=1e-3)


@pytest.mark.parametrize("tune", [{"what": "all"}, {"what": "lora"}, {"what": "last-blocks", "probe": False}])
def test_views_need_frozen_blocks_and_a_probe(colors: Path, base: Path, tmp_path: Path, tune: dict[str, Any]) -> None:
    with pytest.raises(vitral.ConfigError, match=r"tune\.views=2"):
        train(colors, base, tmp_path / "run", tune={**tune, "views": 2})
    assert not (tmp_path / "run").exists()


def test_dropped_patches_need_cached_tokens(colors: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(vitral.ConfigError, match=r"tune\.dropped=0\.2"):
        train(colors, base, tmp_path / "run", tune={"what": "all", "dropped": 0.2})
