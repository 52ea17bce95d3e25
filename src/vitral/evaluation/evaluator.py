"""From a model and data to an Evaluation: finds the held-out pictures, asks the model about each, and sums up."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex, Item
from vitral.data.scan import Progress
from vitral.data.sources import open_dataset, split_off
from vitral.data.splits import A_FIFTH, VAL_FRACTION, choose_splits, own_held_out
from vitral.errors import ConfigError, DataError
from vitral.evaluation import feature_cache
from vitral.evaluation.few_shot import choose_shots, few_shot, neighbours
from vitral.evaluation.label_map import are_numbers, read_real, renumber
from vitral.evaluation.metrics import compare
from vitral.evaluation.results import Evaluation, of_features, summarize
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs, finished, gather
from vitral.weights.checkpoint import Checkpoint

SEEDS = (0, 1, 2)
MOST_APART = 100


def evaluate(source: str | Path | Checkpoint, data: str | Path | None = None, **options: Any) -> Evaluation:
    """How good a model is on data; a run is measured on its own held-out pictures where no data are given.

    ``options`` are the fields of Options: few_shot, knn, against, temperature, label_map, real, device, precision,
    batch_size, workers, image_size, cache."""
    return finished(evaluating(source, data, **options))


@dataclass(frozen=True, kw_only=True)
class Options:
    few_shot: int | Sequence[int] | None = None
    """Measure the features instead: ridge regression on so many pictures a class, three times; or on several numbers
    of them."""
    knn: int | None = None
    """Measure the features instead: a vote of so many nearest neighbours."""
    against: str | Path | Checkpoint | None = None
    """Another model, asked about the same pictures."""
    temperature: bool = False
    """Also tell the calibration after temperature scaling."""
    label_map: str | Path | None = None
    """A file from the data's classes to the model's labels."""
    real: str | Path | None = None
    """A JSON file of all true labels of each picture, as ReaL has them for ImageNet."""
    device: str = "auto"
    precision: str = "float32"
    batch_size: int = 64
    workers: int = 0
    cache: bool = True
    """Keep features on the disk for the next time."""
    image_size: int | tuple[int, int] | None = None
    """Another size than the model was trained at."""

    def __post_init__(self) -> None:
        asked = [("batch_size", self.batch_size, 1), ("workers", self.workers, 0)]
        asked += [("few_shot", shots, 1) for shots in self.shots] + ([] if self.knn is None else [("knn", self.knn, 1)])
        for name, value, least in asked:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.of_features:
            for name in ("against", "real", "temperature", "label_map"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is about answers, and few_shot and knn measure features.")
        for name in ("real", "label_map"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | Path):
                raise ConfigError(f"{name}={path!r} must be the path of a file.")
            if path is not None and not Path(path).is_file():
                raise DataError(f"{name}: there is no file {path}.")

    @property
    def shots(self) -> tuple[int, ...]:
        if self.few_shot is None:
            return ()
        return tuple(self.few_shot) if isinstance(self.few_shot, list | tuple) else (self.few_shot,)  # type: ignore[return-value]

    @property
    def of_features(self) -> bool:
        return bool(self.shots) or self.knn is not None


def evaluating(
    source: str | Path | Checkpoint, data: str | Path | None = None, **options: Any
) -> Iterator[Progress | Evaluation]:
    """The same, told while it goes on: Progress, and the Evaluation at the end."""
    how = Options(**options)
    ready = load_model(source, device=how.device, precision=how.precision, image_size=how.image_size)
    if not how.of_features:
        ready.check_answers()
    asked = choose_pictures(ready, data, needs_train=how.of_features)
    measure = measure_features if how.of_features else measure_answers
    for event in measure(ready, asked, how):
        yield replace(event, split=asked.why) if isinstance(event, Evaluation) else event


# ---- which pictures ----


@dataclass(frozen=True, kw_only=True)
class Asked:
    data: DatasetIndex
    train: tuple[Item, ...]
    test: tuple[Item, ...]
    why: str


def choose_pictures(ready: LoadedModel, data: str | Path | None, *, needs_train: bool) -> Asked:
    """Those that the run held out; of other data its test split, its val split, or all."""
    config, manifest = (ready.run.read_config(), ready.run.read_json(ready.run.manifest)) if ready.run else ({}, {})
    if data is None and not config:
        raise ConfigError("There is no data to measure on.", hint="vitral evaluate WEIGHTS DATA")
    place = str(config["data"]) if data is None else data
    found = open_dataset(place)
    # A run without labels has seen none, and its fingerprint knows of none.
    seen = found if config.get("objective") != "masked-patches" else open_dataset(place, labelled=False)
    is_same = bool(manifest) and manifest.get("data_fingerprint") == seen.fingerprint()
    # By the hash of their names, pictures keep their side also where others were added or taken away.
    is_own = is_same or (data is not None and bool(config) and _same_place(str(data), str(config["data"])))
    if data is None and not is_same:
        raise DataError(
            f"The data at {config['data']} are not those that {ready.run and ready.run.folder} was trained on.",
            hint="Name the data to measure on: vitral evaluate RUN DATA.",
        )
    if is_own:
        other = open_dataset(config["val"]) if config.get("val") else None
        if data is None and other is not None:
            check_val(other, manifest, config)
        splits = choose_splits(found, other, config.get("val_fraction", VAL_FRACTION))
        return Asked(data=found, train=splits.train, test=splits.test, why=splits.reasons["test"])
    train = found.splits.get("train", ())
    if own := own_held_out(found):
        return Asked(data=found, train=train, test=found.splits[own], why=f"the data's own {own} split")
    if needs_train:
        rest, part = split_off(train)
        return Asked(data=found, train=tuple(rest), test=tuple(part), why=A_FIFTH)
    return Asked(data=found, train=(), test=train, why="all pictures")


def check_val(other: DatasetIndex, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Whether the pictures of --val are those that the run held out; one without labels knows them without."""
    seen = other if config.get("objective") != "masked-patches" else open_dataset(config["val"], labelled=False)
    if manifest.get("val_fingerprint", seen.fingerprint()) != seen.fingerprint():
        raise DataError(
            f"The pictures at {config['val']} are not those that the run held out.",
            hint="Name the data to measure on: vitral evaluate RUN DATA.",
        )


def _same_place(first: str, second: str) -> bool:
    return first == second or Path(first).expanduser().resolve() == Path(second).expanduser().resolve()


# ---- answers ----


def measure_answers(ready: LoadedModel, asked: Asked, how: Options) -> Iterator[Progress | Evaluation]:
    if how.temperature and asked.data.multi_label:
        raise ConfigError("temperature scaling needs one label a picture, and these data have several.")
    other = None
    if how.against is not None:
        size = how.image_size if not isinstance(how.against, Checkpoint) else None
        other = load_model(how.against, device=how.device, precision=how.precision, image_size=size)
        other.check_answers()
    start = time.perf_counter()
    answers = yield from ask(ready, asked, how)
    seconds = time.perf_counter() - start
    ready.check_finite(answers.rows)
    found = summarize(answers, ready.labels, temperature=how.temperature)
    notes = tuple(_odd_pair(ready.multi_label, asked.data.multi_label))
    if (
        ready.has_names
        and how.label_map is None
        and ready.labels != asked.data.classes
        and are_numbers(asked.data.classes)
    ):
        notes += (f"the data's classes are numbers, and were taken for the model's labels: 0 is {ready.labels[0]}",)
    if how.temperature and found.scaled is None:
        notes += ("there are too few pictures for temperature scaling",)
    found = replace(found, images_per_second=len(answers.rows) / seconds, notes=notes)
    if how.real is not None:
        found = replace(found, real=by_real(answers, Path(how.real), len(ready.labels)))
    if other is not None:
        others = yield from ask(other, asked, how)
        other.check_finite(others.rows)
        name = "a Checkpoint" if isinstance(how.against, Checkpoint) else str(how.against)
        found = replace(found, against=difference(answers, others, ready, other, name))
    yield found


def _odd_pair(model: bool, data: bool) -> Iterator[str]:
    if data and not model:
        yield "the model was trained for one label a picture; each of its logits is read as a yes or no"
    if model and not data:
        yield "the model was trained for several labels a picture; its largest logit counts"


def ask(ready: LoadedModel, asked: Asked, how: Options) -> Generator[Progress, None, ModelOutputs]:
    """Every held-out picture: its logits and its label among the model's."""
    items = renumber(
        asked.test,
        asked.data.classes,
        ready.labels,
        has_names=ready.has_names,
        label_map=None if how.label_map is None else Path(how.label_map),
    )
    return gather(make_loader(ready, items, asked.data, how), ready.logits)


def make_loader(ready: LoadedModel, items: Sequence[Item], data: DatasetIndex, how: Options) -> BatchLoader:
    return BatchLoader(
        pictures=ImageDataset(items, ready.preprocess, patch=ready.model.config.step_hw),
        batch_size=how.batch_size,
        classes=len(ready.labels),
        multi_label=data.multi_label,
        workers=how.workers,
    )


def by_real(answers: ModelOutputs, path: Path, classes: int) -> dict[str, float]:
    truths = read_real(path, answers.keys, classes)
    best = answers.rows.argmax(1).tolist()
    right = [answer in truth for answer, truth in zip(best, truths, strict=True) if truth]
    return {"top1": sum(right) / len(right), "images": len(right)}


def difference(
    first: ModelOutputs, second: ModelOutputs, ready: LoadedModel, other: LoadedModel, name: str
) -> dict[str, Any]:
    """Of the second model to the first, and the pictures on which they disagree."""
    if not torch.equal(first.order, second.order):
        raise DataError("The two models could not read the same pictures, so they cannot be compared.")
    have_names = ready.has_names and other.has_names
    answers = [
        [who.labels[place] if have_names else str(place) for place in found.rows.argmax(1).tolist()]
        for who, found in ((ready, first), (other, second))
    ]
    apart = [
        {"file": key, "truth": "", "first": mine, "second": theirs}
        | ({"truth": ready.labels[int(label)]} if label.ndim == 0 else {})
        for key, label, mine, theirs in zip(first.keys, first.labels, *answers, strict=True)
        if mine != theirs
    ]
    found = compare(first.right, second.right)
    return {
        "model": name,
        **asdict(found),
        "is_clear": found.is_clear,
        "disagreements": len(apart),
        "examples": apart[:MOST_APART],
        "top1": second.right.double().mean().item(),
    }


# ---- features ----


def measure_features(ready: LoadedModel, asked: Asked, how: Options) -> Iterator[Progress | Evaluation]:
    """Few-shot regression and nearest neighbours on frozen features."""
    if asked.data.multi_label:
        raise ConfigError("few_shot and knn need one label a picture, and these data have several.")
    if not asked.train:
        raise DataError("few_shot and knn learn from a train split, and these data have none.")
    labels = torch.tensor([item.label for item in asked.train])
    notes = tuple(_few(labels, asked.data.classes, how.shots))
    wanted = torch.arange(len(labels))
    model = feature_cache.digest_of(ready) if how.cache else None
    if how.knn is None and not (model and feature_cache.has(feature_cache.key_of(model, asked.train))):
        # Nothing is asked of the others, and they are not there already.
        wanted = torch.cat([choose_shots(labels, max(how.shots), seed) for seed in SEEDS]).unique()
    found, computed, seconds = [], 0, 0.0
    for items in ([asked.train[place] for place in wanted.tolist()], asked.test):
        start, key = time.perf_counter(), None if model is None else feature_cache.key_of(model, items)
        features = None if key is None else feature_cache.read(key, items)
        if features is None:
            features = yield from gather(make_loader(ready, items, asked.data, how), ready.features)
            ready.check_finite(features.rows)
            if key is not None:
                feature_cache.keep(key, features)
            computed, seconds = computed + len(items), seconds + time.perf_counter() - start
        found.append(features)
    rows = torch.full_like(labels, -1)
    rows[wanted[found[0].order]] = torch.arange(len(found[0].order))
    baseline = frozen(
        found[0], found[1], len(asked.data.classes), shots=how.shots, k=how.knn, of_all=OfAll(labels=labels, rows=rows)
    )
    unreadable = found[0].unreadable + found[1].unreadable
    speed = computed / seconds if computed else None
    yield replace(of_features(baseline, found[1], unreadable, images_per_second=speed), notes=notes)


def _few(labels: Tensor, classes: Sequence[str], shots: Sequence[int]) -> Iterator[str]:
    """What to say where a class has fewer pictures than were asked for; ConfigError where none has as many."""
    counts = labels.bincount(minlength=len(classes)).tolist()
    if shots and min(shots) > max(counts):
        raise ConfigError(
            f"few_shot={min(shots)} must be at most {max(counts)}, the number of pictures of the largest class."
        )
    most = max(shots, default=0)
    if fewer := [f"{name} has {count}" for name, count in zip(classes, counts, strict=True) if count < most]:
        yield f"not all classes have {most} training pictures: {', '.join(fewer[:5])}{', ...' if fewer[5:] else ''}"


@dataclass(frozen=True, kw_only=True)
class OfAll:
    """The pictures that a few were chosen from."""

    labels: Tensor
    rows: Tensor
    """Where the features of each are; -1: nowhere."""


def frozen(
    train: ModelOutputs,
    test: ModelOutputs,
    classes: int,
    *,
    shots: Sequence[int],
    k: int | None,
    of_all: OfAll | None = None,
) -> dict[str, dict[str, Any]]:
    """What features are worth: few_shot over three seeds, knn. Of several numbers of shots, the largest stands for
    them, and ``each`` holds all."""
    of_all = of_all or OfAll(labels=train.labels, rows=torch.arange(len(train.rows)))
    results: dict[str, dict[str, Any]] = {}
    each = []
    for number in sorted(set(shots)):
        found = []
        for seed in SEEDS:
            rows = of_all.rows[choose_shots(of_all.labels, number, seed)]
            rows = rows[rows >= 0]
            found.append(few_shot(train.rows[rows], train.labels[rows], test.rows, test.labels, classes=classes))
        each.append({"shots": number, "top1": mean(found), "spread": stdev(found), "seeds": found})
    if each:
        results["few_shot"] = {**each[-1], **({"each": each} if len(each) > 1 else {})}
    if k is not None:
        both = (train.rows, train.labels, test.rows, test.labels)
        results["knn"] = {"k": k, "top1": neighbours(*both, k=k, classes=classes)}
    return results
