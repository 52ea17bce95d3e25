"""From a request to a `Job`: the dataset, its splits, every automatic choice, the network, and the number of steps."""

import os
import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex, check_classes, sample_headers
from vitral.data.dropping import drop_images
from vitral.data.grouping import group_images
from vitral.data.sources import open_dataset
from vitral.data.splits import Splits, choose_splits
from vitral.devices import choose_device
from vitral.errors import ConfigError, DataError, WeightsError
from vitral.files import sha256_of
from vitral.inference.loaded_model import LoadedModel
from vitral.model.bit_config import BiTConfig
from vitral.model.config import Stem
from vitral.model.network import Network, build
from vitral.model.sizes import canonical_name, named_config
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.auto import HEADERS_SAMPLED, Facts, resolve
from vitral.training.config import CUSTOM_MODEL, ResolvedConfig, TrainConfig
from vitral.training.events import Chosen, Event, Warned
from vitral.training.job import Job
from vitral.training.probe import ProbedNetwork, fit_head
from vitral.training.request import Request
from vitral.training.schedule import MIN_STEPS, affordable_side, steps_within
from vitral.training.state import has_state
from vitral.training.step import Learner, initial_loss_scale
from vitral.training.tasks.classification import Classification
from vitral.training.tasks.masked_patches import MaskedPatchPrediction
from vitral.weights.checkpoint import default_preprocess
from vitral.weights.dialects.native import stem_from_dict
from vitral.weights.dialects.plan import ModelSpec
from vitral.weights.formats.opening import open_tensors
from vitral.weights.hub import locate
from vitral.weights.load import load, peek, verify_checksum
from vitral.weights.save import check_modules


def prepare(request: Request, run: Run | Path | None) -> Generator[Event, None, Job]:
    """Yield choices and warnings, and return the Job. A Run is resumed; a path or None creates a new one."""
    check_single_process()
    start = time.perf_counter()
    is_labeled = request.config.objective == "classify"
    dataset = request.dataset or open_dataset(request.config.data, labeled=is_labeled)
    dataset = group_images(drop_images(dataset, request.config.drop), request.config.group_by)
    val = None if request.config.val is None else open_dataset(request.config.val, labeled=is_labeled)
    yield from (Warned(message=note) for note in dataset.notes)
    yield from request.choices
    splits = split_dataset(dataset, val, request.config)
    yield from (Warned(message=note) for note in splits.notes)
    sizes = {"test": len(splits.test), "validation": len(splits.validation)}
    made = [Chosen(name=name, value=f"{size:,} images", reason=splits.reasons[name]) for name, size in sizes.items()]
    yield from made
    config, resolved = resolve_request(request, dataset, splits)
    yield from resolved
    is_new = not (isinstance(run, Run) and has_state(run.state))
    config, model, preprocess, probed = yield from start_network(request, config, dataset, splits, is_new=is_new)
    is_custom = request.network is not None and not _is_describable(model)  # before LoRA adds its modules
    if config.objective == "classify":
        task = Classification(model, preprocess, config, dataset, splits)
    else:
        task = MaskedPatchPrediction(model, preprocess, config)
    learner = Learner(model, task, config)
    train, validation, test = build_loaders(config, dataset, splits, preprocess, model.config.step_hw)
    if config.epochs == "auto":
        elapsed = time.perf_counter() - start
        config, planned = plan_epochs(config, learner, train, validation, test, elapsed)
        resolved = (*resolved, planned)
        yield planned
    assert config.epochs != "auto"
    assert config.optim.warmup_steps != "auto"
    steps, warmup_steps = round(config.epochs * train.batches_per_epoch), config.optim.warmup_steps
    steps = max(1, steps) if config.epochs else 0
    if steps and warmup_steps >= steps:
        yield Warned(message=f"The warmup takes {warmup_steps:,} of {steps:,} steps. Set optim.warmup_steps.")
    return Job(
        config=config,
        dataset=dataset,
        val=val,
        splits=splits,
        preprocess=preprocess,
        learner=learner,
        train=train,
        validation=validation,
        test=test,
        run=run if isinstance(run, Run) else Run.create(run, dataset.name, name_model(config)),
        steps=steps,
        warmup_steps=warmup_steps,
        base_sha256=hash_base(config),
        is_custom=is_custom,
        choices=(*request.choices, *made, *resolved),
        probe_scores=None if probed is None else probed.scores,
        candidates=() if probed is None else probed.candidates,
    )


def start_network(
    request: Request, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, *, is_new: bool
) -> Generator[Event, None, tuple[ResolvedConfig, Network, Preprocess, ProbedNetwork | None]]:
    """Return the network before the first step. A new run from a checkpoint makes its images fit the time, warns of
    changed weights, and fits a linear probe; a resumed one reads its weights from its state."""
    model, preprocess, changes = build_model(config, len(dataset.classes), request.network)
    if not is_new:
        return config, model, preprocess, None
    if config.minutes and config.starts_with_probe and request.config.image_size == "auto":
        smaller = yield from shrink_images(config, model, splits)
        if smaller != config:
            config = smaller
            model, preprocess, changes = build_model(config, len(dataset.classes))
    yield from (Warned(message=f"{config.from_weights}: {change}") for change in changes)
    if not config.starts_with_probe:
        return config, model, preprocess, None
    config, probed = yield from start_from_probe(model, preprocess, config, dataset, splits)
    return config, probed.network, preprocess, probed


def start_from_probe(
    model: Network, preprocess: Preprocess, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits
) -> Generator[Event, None, tuple[ResolvedConfig, ProbedNetwork]]:
    """Fit a linear probe to the network before training, and return the config with the pooling that was best."""
    device = torch.device(config.device)
    loaded = LoadedModel(
        model=model.to(device).eval(),
        preprocess=preprocess,
        labels=dataset.classes,
        has_names=True,
        multi_label=dataset.multi_label,
        device=device,
        precision=config.precision,
        run=None,
    )
    probed = yield from fit_head(loaded, config, dataset, splits)
    if isinstance(probed.network, ViT) and probed.network.config.pool != model.config.pool:
        pooling = {"pool": probed.network.config.pool, "class_token": True}
        config = replace(config, network={**config.network, **pooling})
    return config, probed


def _is_describable(network: Network) -> bool:
    """Return whether a checkpoint of vitral loads as the same network: its modules are ours, without hooks."""
    try:
        return check_modules(network) is None
    except WeightsError:
        return False


def check_single_process() -> None:
    """Raise ConfigError under torchrun: each of its processes would train a run of its own."""
    if "RANK" in os.environ and (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(f"WORLD_SIZE={world}, but vitral trains in one process.", hint="Start it without torchrun.")


def split_dataset(dataset: DatasetIndex, val: DatasetIndex | None, config: TrainConfig) -> Splits:
    """Return the splits. DataError if they cannot be trained or tested on."""
    if config.objective == "classify":
        check_classes(dataset)
    if val is not None and val.multi_label != dataset.multi_label:
        raise DataError("Either DATA or --val has several labels per image, but the other has one.")
    splits = choose_splits(dataset, val, config.val_fraction)
    sample_headers(splits.test, HEADERS_SAMPLED, required=True)
    return splits


def resolve_request(
    request: Request, dataset: DatasetIndex, splits: Splits
) -> tuple[ResolvedConfig, tuple[Chosen, ...]]:
    """Return the config with every choice made. A resumed run made them when it started."""
    config, pretrained = request.config, None
    choose_device(config.device)  # raises if this machine has none
    if isinstance(config, ResolvedConfig):
        return config, ()
    if config.from_weights:
        if Run.is_run(Path(config.from_weights)):
            Run(config.from_weights).trained_model()  # raises if there is none yet
        verify_checksum(config.from_weights)
        pretrained = peek(config.from_weights)
    elif request.network is not None:
        pretrained = ModelSpec(config=request.network.config, preprocess=default_preprocess(request.network))
    headers = request.headers
    if headers is None:
        headers = sample_headers(dataset.splits.get("train", ()), HEADERS_SAMPLED)
    facts = Facts(
        dataset=dataset,
        train=splits.train,
        headers=headers,
        pretrained=pretrained,
        has_validation=splits.validation is not splits.train,
    )
    return resolve(config, facts)


def build_loaders(
    config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, preprocess: Preprocess, patch: tuple[int, int]
) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    """Return the loaders of the train, validation and test splits."""
    if preprocess.resize == "native" and (config.mix.mixup or config.mix.cutmix):
        raise ConfigError("mix needs images of one size, but resize=native keeps their own.", hint="Use resize=crop.")
    images = partial(ImageDataset, preprocess=preprocess, seed=config.seed, patch=patch)
    loader = partial(BatchLoader, classes=len(dataset.classes), multi_label=dataset.multi_label, workers=config.workers)
    size = config.batch_size
    # Masked patches divide a batch themselves, since the hidden patches belong to the whole batch.
    eval_size = size // config.accumulate if config.objective == "classify" else size
    train_size = min(size, len(splits.train))
    return (
        loader(images=images(splits.train, augment=config.augment), batch_size=train_size, shuffle=True),
        loader(images=images(splits.validation), batch_size=eval_size),
        loader(images=images(splits.test), batch_size=eval_size),
    )


# ---- network ----


def build_model(
    config: ResolvedConfig, classes: int, network: Network | None = None
) -> tuple[Network, Preprocess, list[str]]:
    """Return the network at the size of the run with a new head, its preprocessing, and how its weights changed."""
    torch.manual_seed(config.seed)  # pyright: ignore[reportUnknownMemberType]
    if network is not None:
        return adopt_network(network, classes, config)
    if config.model.startswith(CUSTOM_MODEL):
        raise ConfigError(
            f"This run trains a network of your own ({config.model.removeprefix(CUSTOM_MODEL)}).",
            hint="Pass it again in Python: vitral.train(resume=..., model=network).",
        )
    fields: dict[str, Any] = {"num_classes": classes, **config.network}
    if isinstance(fields.get("stem"), dict):
        fields["stem"] = parse_stem(fields["stem"])
    base = peek(config.from_weights).config if config.from_weights else named_config(config.model)
    if config.objective == "classify" and fields.get("pool", base.pool) == "none":
        raise ConfigError(
            "network.pool=none gives logits per token, but classification needs them per image.",
            hint="Use token, mean or map.",
        )
    if not isinstance(base, BiTConfig):
        fields = {"dropout": config.dropout, "drop_path": config.drop_path, **fields}
    elif config.dropout or config.drop_path:
        raise ConfigError("A BiT has neither dropout nor drop_path.", hint="Leave them at 0.")
    if config.from_weights:
        if not isinstance(base, BiTConfig):  # the paper's fine-tuning drops the hidden layer of the head
            fields = {"representation": None, **fields}
        loaded = load(config.from_weights, image_size=config.image_size, channels=config.channels, **fields)
        changes = [] if loaded.report is None else [*loaded.report.resized.values(), *loaded.report.warnings]
        return loaded.model.float(), replace(loaded.preprocess, resize=config.resize), changes
    fields = {"image_size": config.image_size, "channels": config.channels, **fields}
    return build(named_config(config.model, **fields)), make_preprocess(config), []


def make_preprocess(config: ResolvedConfig) -> Preprocess:
    """Return the preprocessing of a network that is trained from scratch."""
    size = config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)
    crop_fraction = 0.875 if config.resize == "crop" else 1.0
    preprocess = Preprocess(size=size, resize=config.resize, crop_fraction=crop_fraction)
    return preprocess.with_channels(config.channels)


def adopt_network(network: Network, classes: int, config: ResolvedConfig) -> tuple[Network, Preprocess, list[str]]:
    """Return a network of the caller's own, with a new head if it has another number of classes."""
    if config.network or config.dropout or config.drop_path:
        raise ConfigError("network, dropout and drop_path do not apply to a network of your own.", hint="Drop them.")
    sizes = (config.image_size, (config.image_size, config.image_size))
    if network.config.image_hw not in sizes or network.config.channels != config.channels:
        raise ConfigError(
            f"Your network takes {network.config.image_hw} pixels and {network.config.channels} channels, but the "
            f"settings say {config.image_size} and {config.channels}.",
            hint="Build it with the same image_size and channels.",
        )
    if network.config.num_classes != classes:
        network.reset_head(classes)
    return network, make_preprocess(config), []


def parse_stem(fields: dict[str, Any]) -> Stem:
    try:
        return stem_from_dict(fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"network.stem={fields!r} is not a stem.",
            hint="Use kind='resnet' (with stages, width_factor) or kind='convolutions' (with widths, norm).",
        ) from error


def hash_base(config: ResolvedConfig) -> str | None:
    """Return the SHA-256 of the checkpoint that a partial training belongs to."""
    if not config.from_weights or config.tune.what == "all":
        return None
    path = open_tensors(locate(config.from_weights)).path
    return sha256_of(path) if path is not None and path.is_file() else None


def name_model(config: ResolvedConfig) -> str:
    """Return the name of the model in the name of the run folder."""
    if config.from_weights:
        return Path(config.from_weights.removeprefix("hf:")).stem
    if config.model.startswith(CUSTOM_MODEL):
        return config.model.removeprefix(CUSTOM_MODEL)
    return canonical_name(config.model)


def shrink_images(config: ResolvedConfig, model: Network, splits: Splits) -> Generator[Event, None, ResolvedConfig]:
    """Choose smaller images if the features of all images would take most of the time budget."""
    side, step = config.image_size, model.config.step_hw[0]
    if not isinstance(side, int) or config.minutes is None:
        return config
    views = 2 if config.augment.flip else 1
    images = views * len(splits.train) + len(splits.validation) + len(splits.test)
    seconds = time_forward(model, config)
    budget = 60 * config.minutes
    smaller = affordable_side(side, step, seconds_per_image=seconds, images=images, budget=budget)
    if smaller == side:
        return config
    reason = f"features of {images:,} images at {side} pixels would take {images * seconds / 60:.1f} minutes"
    yield Chosen(name="image_size", value=smaller, reason=reason)
    return replace(config, image_size=smaller)


def time_forward(model: Network, config: ResolvedConfig) -> float:
    """Return the seconds per image of a forward pass in a batch, after one to warm up."""
    device = torch.device(config.device)
    images = torch.zeros(8, config.channels, *model.config.image_hw, device=device)
    model.to(device).eval()
    start = 0.0
    with torch.inference_mode():
        for _ in range(2):
            start = time.perf_counter()
            model.features(images).pooled.sum().item()
    return (time.perf_counter() - start) / len(images)


def plan_epochs(
    config: ResolvedConfig,
    learner: Learner,
    train: BatchLoader,
    validation: BatchLoader,
    test: BatchLoader,
    elapsed: float,
) -> tuple[ResolvedConfig, Chosen]:
    """Choose how many epochs fit into what is left of the time budget, from the speed of a few steps.

    After a linear probe, training is skipped if a guess from the speed of a forward pass leaves it too few steps.
    """
    plan = partial(
        steps_within,
        60 * (config.minutes or 0) - elapsed,
        batch_size=train.batch_size,
        steps_per_epoch=train.batches_per_epoch,
        validation=len(validation.images),
        test=len(test.images),
    )
    if config.starts_with_probe:
        guess = plan(2 * train.batch_size * time_forward(learner.model, config))
        if guess < MIN_STEPS:
            tune, optim = replace(config.tune, what="probe"), replace(config.optim, warmup_steps=0)
            reason = f"no time is left for {MIN_STEPS} steps after the linear probe"
            return replace(config, tune=tune, optim=optim, epochs=0), Chosen(name="epochs", value=0, reason=reason)
    seconds = learner.time_step(train, initial_loss_scale(config))
    steps = plan(seconds)
    epochs, optim = steps / train.batches_per_epoch, config.optim
    if optim.warmup_steps == "auto":
        optim = replace(optim, warmup_steps=min(max(1, steps // 20), steps - 1))
    choice = Chosen(name="epochs", value=round(epochs, 2), reason=f"{steps} steps of {seconds:.2f} s fit the time")
    return replace(config, epochs=epochs, optim=optim), choice
