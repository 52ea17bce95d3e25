"""From a request to a `Job`: the dataset, its splits, every automatic choice, the network, and the number of steps."""

import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import torch

from vitral.collectives import current_world, from_first, join_world
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex, check_classes, sample_headers
from vitral.data.dropping import drop_images
from vitral.data.grouping import group_images
from vitral.data.prefetch import loading_threads
from vitral.data.sources import open_dataset
from vitral.data.splits import Splits, choose_splits, sample_items
from vitral.devices import World, choose_device
from vitral.errors import ConfigError, DataError, WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.network import Network
from vitral.runs import Run, quote
from vitral.training.auto import HEADERS_SAMPLED, MAX_SMALL_SIDE, Facts, resolve
from vitral.training.budget import MIN_STEPS, REPORT_SECONDS, Budget, last_seconds
from vitral.training.config import CUSTOM_MODEL, ResolvedConfig, TrainConfig
from vitral.training.events import Chosen, Event, Warned
from vitral.training.feature_plan import count_work, limit_splits
from vitral.training.job import Job
from vitral.training.kernels import choose_kernels
from vitral.training.near_duplicates import NearDuplicates, search_near_duplicates
from vitral.training.networks import build_model, hash_base, name_model
from vitral.training.parallel import check_same_dataset, only_first, temporary_folder
from vitral.training.request import Request
from vitral.training.state import has_state
from vitral.training.step import Learner, initial_loss_scale
from vitral.training.tasks.classification import Classification
from vitral.training.tasks.masked_patches import MaskedPatchPrediction
from vitral.training.token_loader import Loader, TokenLoader
from vitral.training.tokens import TokenSet, count_patches
from vitral.training.warm_start import WarmStart, restore_warm_start, start_from_checkpoint
from vitral.weights.checkpoint import default_preprocess
from vitral.weights.dialects.plan import ModelSpec
from vitral.weights.load import peek, verify_checksum
from vitral.weights.pretrained import recommend
from vitral.weights.save import check_modules


def prepare(request: Request, run: Run | Path | None) -> Generator[Event, None, Job]:
    """Yield choices and warnings, and return the Job. A Run is resumed; a path or None creates a new one."""
    world = join_world()
    start = time.perf_counter()
    pretrained = peek_checkpoint(request.config)
    dataset, val = open_datasets(request)
    yield from (Warned(message=note) for note in dataset.notes)
    yield from request.choices
    is_resumed = from_first(isinstance(run, Run) and has_state(run.state))
    budget = None if is_resumed else start_budget(request.config, pretrained, start)  # a resumed run repeats its plan
    if isinstance(run, Run) and is_resumed:
        duplicates = NearDuplicates(groups=run.read_manifest().get("groups", {}))
    else:
        duplicates = yield from search_near_duplicates(request.config, dataset, budget)
        is_grouped = "group" if duplicates.pairs else "ignore"
        request = replace(request, config=replace(request.config, near_duplicates=is_grouped))
    splits = split_dataset(dataset, val, request.config, duplicates.groups)
    yield from (Warned(message=note) for note in splits.notes)
    sizes = {"test": len(splits.test), "validation": len(splits.validation)}
    choices = [Chosen(name=name, value=f"{size:,} images", reason=splits.reasons[name]) for name, size in sizes.items()]
    yield from choices
    config, resolved = resolve_request(request, dataset, splits)
    if world.size > 1 and not isinstance(request.config, ResolvedConfig):
        config, shared = divide_batches(config, world)
        resolved = (*resolved, shared)
    is_open = budget is not None and request.config.tune.what == "auto" and config.tune.what != "probe"  # by the time
    deferred = [choice for choice in resolved if is_open and config.starts_with_probe and choice.name == "tune.what"]
    yield from (choice for choice in resolved if choice not in deferred)
    if advice := advise_checkpoint(config, is_resumed=is_resumed):
        yield advice
    warm = yield from start_network(request, config, dataset, splits, budget, resumed=run if is_resumed else None)
    if any(choice.name == "tune.what" for choice in warm.choices):
        resolved = tuple(choice for choice in resolved if choice not in deferred)
    else:
        yield from deferred
    job = make_job(request, warm, dataset, val, run, choices=(*request.choices, *choices, *resolved, *warm.choices))
    if budget is not None:
        job = attach_budget(job, budget, warm)
    if job.config.epochs == "auto":
        job, planned = plan_epochs(job)
        yield planned
    if not isinstance(request.config, ResolvedConfig):
        before = len(job.choices)
        job = choose_kernels(job, may_compile=request.config.compile == "auto")
        yield from job.choices[before:]
    job = replace(job, groups=duplicates.groups, findings=list_findings(warm, duplicates))
    if 0 < job.steps <= job.warmup_steps:
        yield Warned(message=f"The warmup takes {job.warmup_steps:,} of {job.steps:,} steps. Set optim.warmup_steps.")
    return job


def open_datasets(request: Request) -> tuple[DatasetIndex, DatasetIndex | None]:
    """Return the dataset without the images to drop, in groups, and that of `--val`."""
    config, is_labeled = request.config, request.config.objective == "classify"
    dataset = request.dataset or open_dataset(config.data, labeled=is_labeled)
    dataset = group_images(drop_images(dataset, config.drop), config.group_by)
    check_same_dataset(dataset)
    return dataset, None if config.val is None else open_dataset(config.val, labeled=is_labeled)


def start_budget(config: TrainConfig, pretrained: ModelSpec | None, start: float) -> Budget | None:
    """Return the time budget of a run that started at `start`, if it has one."""
    if config.minutes is None:
        return None
    last = REPORT_SECONDS if pretrained is None else last_seconds(pretrained.config, config.minutes)
    return Budget(end=start + 60 * config.minutes, last_seconds=last)


def start_network(
    request: Request,
    config: ResolvedConfig,
    dataset: DatasetIndex,
    splits: Splits,
    budget: Budget | None,
    *,
    resumed: Run | Path | None,
) -> Generator[Event, None, WarmStart]:
    """Return the network before its first step, with a linear probe if it starts with one."""
    if config.starts_with_probe and isinstance(resumed, Run):
        return (yield from restore_warm_start(config, dataset, splits, resumed))
    if config.starts_with_probe:
        return (yield from start_from_checkpoint(request.config, config, dataset, splits, budget))
    network, preprocess, changes = build_model(config, len(dataset.classes), request.network)
    if resumed is None:
        yield from (Warned(message=f"{config.from_weights}: {change}") for change in changes)
    return WarmStart(config=config, splits=limit_splits(splits, config), network=network, preprocess=preprocess)


def peek_checkpoint(config: TrainConfig) -> ModelSpec | None:
    """Return what the checkpoint holds, if there is one. Raise an error if it cannot be read, before anything slow."""
    if config.from_weights is None:
        return None
    if Run.is_run(Path(config.from_weights)):
        Run(config.from_weights).trained_model()  # raises if there is none yet
    return peek(config.from_weights)


def advise_checkpoint(config: ResolvedConfig, *, is_resumed: bool) -> Warned | None:
    """Return the command that would do far better, for a run that learns photos from scratch."""
    sizes = config.image_size if isinstance(config.image_size, tuple) else (config.image_size,)
    is_custom = config.model.startswith(CUSTOM_MODEL)
    if config.from_weights or is_resumed or is_custom or config.objective != "classify" or min(sizes) <= MAX_SMALL_SIDE:
        return None
    name, _ = recommend(config.device)
    command = f"vitral train {quote(config.data)} --from {name}"
    return Warned(message=f"Photos are hard to learn from scratch. A checkpoint would do far better: {command}")


def list_findings(warm: WarmStart, duplicates: NearDuplicates) -> Mapping[str, Any]:
    """Return what the features of a new run say about its dataset, as plain values."""
    if warm.probe is None:
        return {}
    return {
        "label_errors": [asdict(row) for row in warm.probe.label_errors],
        "near_duplicates": [asdict(row) for row in duplicates.rows(warm.splits)],
        "near_duplicates_searched": duplicates.is_searched,
        "random_split": duplicates.as_dict(),
    }


def make_job(
    request: Request,
    warm: WarmStart,
    dataset: DatasetIndex,
    val: DatasetIndex | None,
    run: Run | Path | None,
    *,
    choices: tuple[Chosen, ...],
) -> Job:
    """Return the Job of a network before its first step."""
    config, model, preprocess = warm.config, warm.network, warm.preprocess
    is_custom = request.network is not None and not _is_describable(model)  # before LoRA adds its modules
    if config.objective == "classify":
        task = Classification(model, preprocess, config, dataset, warm.splits)
    else:
        task = MaskedPatchPrediction(model, preprocess, config)
    learner = Learner(model, task, config)
    train, validation, refit, test = build_loaders(warm, dataset, model.config)
    return Job(
        config=config,
        dataset=dataset,
        val=val,
        splits=warm.splits,
        preprocess=preprocess,
        learner=learner,
        train=train,
        validation=validation,
        test=test,
        refit=refit,
        run=run if isinstance(run, Run) else create_run(run, dataset.name, name_model(config)),
        base_sha256=hash_base(config),
        is_custom=is_custom,
        choices=choices,
        probe=warm.probe,
        candidates=() if warm.probe is None else warm.probe.candidates,
        heads=warm.heads,
        tokens=warm.tokens,
        start={name: p.detach().clone() for name, p in model.named_parameters() if warm.heads and p.requires_grad},
    )


def create_run(folder: Path | None, data: str, model: str) -> Run:
    """Create the run folder: a temporary one in every process but the first."""
    with only_first() as is_writer:
        return Run.create(folder, data, model) if is_writer else Run(temporary_folder())
    raise AssertionError


def divide_batches(config: ResolvedConfig, world: World) -> tuple[ResolvedConfig, Chosen]:
    """Return the config with at least one micro-batch per process, so that any number of processes can resume it."""
    parts = lcm(config.accumulate, world.size)
    if config.batch_size % parts:
        raise ConfigError(
            f"batch_size={config.batch_size} is not a multiple of the {parts} micro-batches of {world.size} processes.",
            hint=f"Use --batch-size {-(-config.batch_size // parts) * parts}.",
        )
    reason = f"{world.size} processes ({world.reason})"
    return replace(config, accumulate=parts), Chosen(name="accumulate", value=parts, reason=reason)


def _is_describable(network: Network) -> bool:
    """Return whether a checkpoint of vitral loads as the same network: its modules are ours, without hooks."""
    try:
        return check_modules(network) is None
    except WeightsError:
        return False


def split_dataset(
    dataset: DatasetIndex, val: DatasetIndex | None, config: TrainConfig, groups: Mapping[str, str] | None = None
) -> Splits:
    """Return the splits. DataError if they cannot be trained or tested on."""
    if config.objective == "classify":
        check_classes(dataset)
    if val is not None and val.multi_label != dataset.multi_label:
        raise DataError("Either DATA or --val has several labels per image, but the other has one.")
    splits = choose_splits(dataset, val, config.val_fraction, groups)
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
        is_validation_carved=splits.is_validation_carved,
    )
    return resolve(config, facts)


def build_loaders(
    warm: WarmStart, dataset: DatasetIndex, network: ViTConfig | BiTConfig
) -> tuple[Loader, Loader, Loader | None, BatchLoader]:
    """Return the loaders of the train and validation splits, of the images of the refit, and of the test split.

    The refit sees the validation images and as many training images.
    """
    config, splits, preprocess = warm.config, warm.splits, warm.preprocess
    if preprocess.resize == "native" and (config.mix.mixup or config.mix.cutmix):
        raise ConfigError("mix needs images of one size, but resize=native keeps their own.", hint="Use resize=crop.")
    images = partial(ImageDataset, preprocess=preprocess, seed=config.seed, patch=network.step_hw)
    world = current_world()
    share = {"rank": world.rank, "world": world.size}
    threads = max(1, loading_threads() // (2 * world.local_size))  # the step needs cores as well
    loader = partial(
        BatchLoader,
        classes=len(dataset.classes),
        multi_label=dataset.multi_label,
        workers=config.workers,
        threads=threads if config.device == "cpu" and not config.workers else 0,
        **share,
    )
    size = config.batch_size
    # Masked patches divide a batch themselves, since the hidden patches belong to the whole batch.
    eval_size = size // config.accumulate if config.objective == "classify" else size
    test = loader(images=images(splits.test), batch_size=eval_size)
    if warm.tokens is not None:
        assert isinstance(network, ViTConfig)
        return *token_loaders(warm.tokens, config, network, trained=len(splits.train)), test
    train = partial(loader, shuffle=True)
    refit = None
    if config.refit and config.tune.what != "probe":
        mixed = (*splits.validation, *sample_items(splits.train, len(splits.validation)))
        refit = train(images=images(mixed, augment=config.augment), batch_size=min(size, len(mixed)))
    return (
        train(images=images(splits.train, augment=config.augment), batch_size=min(size, len(splits.train))),
        loader(images=images(splits.validation), batch_size=eval_size),
        refit,
        test,
    )


def token_loaders(
    tokens: TokenSet, config: ResolvedConfig, network: ViTConfig, *, trained: int
) -> tuple[TokenLoader, TokenLoader, TokenLoader | None]:
    """Return the loaders of the training images (the first `trained`), of the validation images and of the refit."""
    rows, first, world = torch.arange(len(tokens)), tokens.rows_before(trained), current_world()
    train, validation = rows[:first], rows[first:]
    shuffled = partial(
        TokenLoader,
        images=tokens,
        shuffle=True,
        seed=config.seed,
        extras=network.extra_tokens,
        patches=count_patches(network, config.tune.dropped)[0],
        rank=world.rank,
        world=world.size,
    )
    size = config.batch_size
    refit = None
    if config.refit:
        random = torch.Generator().manual_seed(config.seed)
        mixed = torch.cat([validation, train[torch.randperm(first, generator=random)[: len(validation)]]])
        refit = shuffled(rows=mixed, batch_size=min(size, len(mixed)))
    return (
        shuffled(rows=train, batch_size=min(size, len(train))),
        TokenLoader(images=tokens, rows=validation, batch_size=size, rank=world.rank, world=world.size),
        refit,
    )


def attach_budget(job: Job, budget: Budget, warm: WarmStart) -> Job:
    """Return the job with its time budget and the speed of this machine, as measured or as a step shows it."""
    image, test_image = warm.image_seconds, warm.test_seconds
    if not image:
        image = test_image = job.learner.time_step(job.train, initial_loss_scale(job.config)) / 3 / job.train.batch_size
    share = job.config.tune.blocks / len(job.learner.model.blocks) if job.tokens is not None else 1.0
    return replace(job, budget=replace(budget, image=image, test_image=test_image, validation_image=share * image))


def plan_epochs(job: Job) -> tuple[Job, Chosen]:
    """Choose how many epochs fit into what is left of the time budget.

    The first steps show the real speed, and the loop then corrects the number. After a linear probe, training is
    skipped if it would be too short.
    """
    assert job.budget is not None
    config, train = job.config, job.train
    step_cost = max(0.1, count_work(job.learner.model, config, job.splits).step_cost)
    step_seconds = train.batch_size * job.budget.image * step_cost
    steps = job.affordable_steps(step_seconds, step=0)
    if job.heads is not None and steps < MIN_STEPS:
        reason = f"no time is left for {MIN_STEPS} steps after the linear probe"
        choice = Chosen(name="epochs", value=0, reason=reason)
        optim = replace(config.optim, warmup_steps=0)
        return replace(job, config=replace(config, optim=optim, epochs=0)).with_choice(choice), choice
    steps = max(1, min(steps, job.max_steps))
    epochs, optim = steps / train.batches_per_epoch, config.optim
    if optim.warmup_steps == "auto":
        optim = replace(optim, warmup_steps=min(max(1, steps // 20), steps - 1))
    choice = Chosen(name="epochs", value=round(epochs, 2), reason=f"about {steps} steps of {step_seconds:.2f} s fit")
    return replace(job, config=replace(config, epochs=epochs, optim=optim)).with_choice(choice), choice
