"""Evaluate a model on a dataset: its classifier, or its frozen features."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitral.collectives import current_world, join_world
from vitral.data.scan import Progress
from vitral.errors import ConfigError, DataError, check_int
from vitral.evaluation.frozen_features import evaluate_features
from vitral.evaluation.label_map import are_numbers, match_classes, read_real, relabel, unique_positions
from vitral.evaluation.metrics import compare
from vitral.evaluation.results import Evaluation, summarize
from vitral.inference.engines.choosing import check_request
from vitral.inference.evaluation_data import EvaluationData, choose_evaluation_data
from vitral.inference.exported_model import ExportedModel, check_not_merged, is_exported, open_exported
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs, make_loader, run_model
from vitral.inference.torch_backend import with_engine
from vitral.weights.checkpoint import Checkpoint

MAX_BATCH_SIZE, MAX_WORKERS = 2**31, 1024
CHECKPOINT_HINT = "Pass the checkpoint as MODEL."
MAX_EXAMPLES = 100
"""Largest number of disagreements listed in a comparison of two models."""
ModelSource = str | Path | Checkpoint
RunnableModel = LoadedModel | ExportedModel
DataSource = str | Path


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    """The options of `evaluate`, checked."""

    few_shot: int | Sequence[int] | None = None
    knn: int | None = None
    against: ModelSource | None = None
    against_label_map: str | Path | None = None
    temperature: bool = False
    label_map: str | Path | None = None
    real: str | Path | None = None
    image_size: int | tuple[int, int] | None = None
    merge: int | None = None
    device: str = "auto"
    engine: str | None = None
    precision: str = "float32"
    batch_size: int = 64
    workers: int = 0
    cache: bool = True
    on_stage: Callable[[str], None] = lambda stage: None

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, minimum=1, maximum=MAX_BATCH_SIZE)
        check_int("workers", self.workers, minimum=0, maximum=MAX_WORKERS)
        for shots in self.shots:
            check_int("few_shot", shots, minimum=1)
        if self.knn is not None:
            check_int("knn", self.knn, minimum=1)
        if self.against_label_map is not None and self.against is None:
            raise ConfigError("against_label_map needs a second model.", hint="Pass against=MODEL.")
        for name in ("against", "real", "temperature", "label_map"):
            if self.uses_features and getattr(self, name):
                raise ConfigError(f"{name} evaluates a classifier, but few_shot and knn evaluate features.")
        for name in ("real", "label_map", "against_label_map"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | Path):
                raise ConfigError(f"{name} must be the path of a file (got {path!r}).")
            if path is not None and not Path(path).is_file():
                raise DataError(f"{name}: file not found: {path}.")

    @property
    def shots(self) -> tuple[int, ...]:
        """Return the requested numbers of shots."""
        few_shot = () if self.few_shot is None else self.few_shot
        return tuple(few_shot) if isinstance(few_shot, list | tuple) else (few_shot,)  # type: ignore[return-value]

    @property
    def chosen_engine(self) -> str:
        """Return the requested engine, or the default of the precision."""
        return self.engine or ("openvino" if self.precision == "int8" else "torch")

    @property
    def uses_features(self) -> bool:
        """Return whether frozen features are evaluated instead of the classifier."""
        return bool(self.shots) or self.knn is not None


def evaluate(
    model: ModelSource,
    data: DataSource | None = None,
    *,
    few_shot: int | Sequence[int] | None = None,
    knn: int | None = None,
    against: ModelSource | None = None,
    against_label_map: str | Path | None = None,
    temperature: bool = False,
    label_map: str | Path | None = None,
    real: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    merge: int | None = None,
    device: str = "auto",
    engine: str | None = None,
    precision: str = "float32",
    batch_size: int = 64,
    workers: int = 0,
    cache: bool = True,
) -> Evaluation:
    """Evaluate a model: accuracy with its confidence interval, per-class scores, calibration and mistakes.

    With ``few_shot`` or ``knn``, evaluate its frozen features instead of its classifier.

    Args:
        model: a run folder, a weights file, a shipped or pretrained name, ``hf:owner/name``, or a Checkpoint.
        data: the dataset to evaluate on. Defaults to the test split of the run.
        few_shot: images per class for a ridge regression on the features, over three seeds; one number or several.
        knn: evaluate the features by a vote of this many nearest neighbors.
        against: a second model to compare with on the same images.
        against_label_map: the label map of the second model. Without one, its labels must match by name.
        temperature: also report the calibration after temperature scaling.
        label_map: a file that maps the dataset's classes to the model's labels.
        real: a JSON file with all true labels of each image, as ReaL provides for ImageNet.
        image_size: another input size than the model was trained at.
        merge: pairs of similar tokens to merge per block, in ``model`` but not in the model of ``against``.
        device: cpu, cuda, cuda:1, mps or auto.
        engine: torch (the default), compiled, onnxruntime or openvino (the default for int8); auto measures them and
            takes the fastest that agrees.
        precision: float32, bfloat16, float16 or int8.
        batch_size, workers: images per batch; processes that load images, or 0 for threads of this process.
        cache: keep features on disk for the next evaluation.
    """
    options = EvaluateOptions(
        few_shot=few_shot,
        knn=knn,
        against=against,
        against_label_map=against_label_map,
        temperature=temperature,
        label_map=label_map,
        real=real,
        image_size=image_size,
        merge=merge,
        device=device,
        engine=engine,
        precision=precision,
        batch_size=batch_size,
        workers=workers,
        cache=cache,
    )
    *_, evaluation = evaluate_events(model, data, options)
    assert isinstance(evaluation, Evaluation)
    return evaluation


def evaluate_events(
    model: ModelSource, data: DataSource | None, options: EvaluateOptions
) -> Iterator[Progress | Evaluation]:
    """Evaluate a model as `evaluate` does; yield progress, then the Evaluation."""
    join_world()
    loaded = _load(model, options, image_size=options.image_size, merge=options.merge)
    if not options.uses_features:
        loaded.check_has_head()
    chosen = choose_evaluation_data(loaded.run, data, needs_train=options.uses_features)
    loaded, notes = _choose_engine(loaded, chosen, data, options)
    if not options.uses_features:
        evaluation = yield from _evaluate_classifier(loaded, chosen, options)
    elif isinstance(loaded, ExportedModel):
        raise ConfigError("few_shot and knn need features, but exported files output logits.", hint=CHECKPOINT_HINT)
    else:
        evaluation = yield from evaluate_features(loaded, chosen, options)
    notes = (*evaluation.notes, *notes)
    yield replace(evaluation, split=chosen.reason, notes=notes, engine=loaded.computed_by)


def _load(
    model: ModelSource, options: EvaluateOptions, image_size: int | tuple[int, int] | None, merge: int | None = None
) -> RunnableModel:
    """Load a model with eager torch, or open an exported file, whose precision is its own."""
    engine, precision = options.chosen_engine, options.precision
    if is_exported(model):
        check_not_merged(merge)
        return open_exported(str(model), engine=options.engine or "auto", image_size=image_size, device=options.device)
    check_request(engine, precision)
    torch_precision = precision if engine == "torch" and precision != "auto" else "float32"
    sizes: dict[str, Any] = dict(image_size=image_size, merge=merge)
    return load_model(model, device=options.device, precision=torch_precision, verify=True, **sizes)


def _choose_engine(
    model: RunnableModel, data: EvaluationData, source: DataSource | None, options: EvaluateOptions
) -> tuple[RunnableModel, tuple[str, ...]]:
    """Return the model with the requested engine, and a note. Models without a run calibrate int8 on `source`."""
    if options.chosen_engine == "torch" or isinstance(model, ExportedModel):
        return model, ()
    chosen, reason = with_engine(
        model,
        options.chosen_engine,
        options.precision,
        batch=options.batch_size,
        items=data.train + data.test,
        calibration=None if model.run else source,
        on_stage=options.on_stage,
    )
    return chosen, (reason,) if reason else ()


# ---- the classifier ----


def _evaluate_classifier(
    model: RunnableModel, data: EvaluationData, options: EvaluateOptions
) -> Generator[Progress, None, Evaluation]:
    if options.temperature and data.dataset.multi_label:
        raise ConfigError("Temperature scaling needs one label per image, but this dataset is multi-label.")
    classes = data.dataset.classes
    indices = match_classes(classes, model.labels, has_names=model.has_names, label_map=options.label_map)
    first = _Matched(model=model, indices=indices)
    second = None if options.against is None else _load_second(options.against, first, classes, options)
    start = time.perf_counter()
    outputs = yield from _run(first, data, options)
    seconds = time.perf_counter() - start
    evaluation = summarize(outputs, model.labels, temperature=options.temperature)
    notes = (*model.warnings, *_notes(model, data, options, evaluation))
    evaluation = replace(evaluation, images_per_second=len(outputs.outputs) / seconds, notes=notes)
    if options.real is not None:
        evaluation = replace(evaluation, real=_score_real(outputs, options.real, len(model.labels)))
    if second is not None:
        second_outputs = yield from _run(second, data, options)
        against = _compare_models(first, outputs, second, second_outputs, classes)
        evaluation = replace(evaluation, against=against)
    return evaluation


def _run(
    matched: "_Matched", data: EvaluationData, options: EvaluateOptions
) -> Generator[Progress, None, ModelOutputs]:
    """Yield progress and return the logits of the test images."""
    model, items = matched.model, relabel(data.test, matched.indices)
    loader = make_loader(
        model,
        items,
        multi_label=data.dataset.multi_label,
        batch_size=options.batch_size,
        workers=options.workers,
        world=current_world(),
    )
    outputs = yield from run_model(loader, model.logits)
    model.check_finite(outputs.outputs)
    return outputs


def _notes(
    model: RunnableModel, data: EvaluationData, options: EvaluateOptions, evaluation: Evaluation
) -> Iterator[str]:
    classes, multi_label = data.dataset.classes, data.dataset.multi_label
    if multi_label and not model.multi_label:
        yield "the model was trained with one label per image; each logit counts as a separate yes or no"
    if model.multi_label and not multi_label:
        yield "the model was trained with several labels per image; only its largest logit counts"
    if model.has_names and options.label_map is None and model.labels != classes and are_numbers(classes):
        yield f"the dataset's classes are numbers, used as indices of the model's labels: 0 is {model.labels[0]}"
    if options.temperature and evaluation.scaled is None:
        yield "too few images for temperature scaling"


def _score_real(outputs: ModelOutputs, path: str | Path, classes: int) -> dict[str, float]:
    true_labels = read_real(Path(path), outputs.keys, classes)
    predicted = outputs.outputs.argmax(1).tolist()
    correct = [index in labels for index, labels in zip(predicted, true_labels, strict=True) if labels]
    return {"top1": sum(correct) / len(correct), "images": len(correct)}


# ---- a second model ----


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matched:
    """A model with the logit index of each class of the dataset."""

    model: RunnableModel
    indices: list[int]
    name: str = ""

    def class_names(self, classes: Sequence[str]) -> list[str]:
        """Return a name for each logit: the class of the dataset, or the label if there is none."""
        names = dict(enumerate(self.model.labels)) | dict(zip(self.indices, classes, strict=True))
        return list(names.values())


def _load_second(source: ModelSource, first: _Matched, classes: Sequence[str], options: EvaluateOptions) -> _Matched:
    """Load the second model and match its labels. Raise DataError if they do not correspond to the classes."""
    is_checkpoint = isinstance(source, Checkpoint)
    name = "the second model" if is_checkpoint else str(source)
    model = _load(source, options, image_size=None if is_checkpoint else options.image_size)
    model.check_has_head()
    label_map = options.against_label_map
    if label_map is None and model.labels == first.model.labels:
        return _Matched(name=name, model=model, indices=first.indices)
    is_matched = not model.has_names or set(classes) <= unique_positions(model.labels).keys()
    if label_map is None and (options.label_map is not None or not is_matched):
        raise DataError(
            f"The labels of {name} ({', '.join(model.labels[:3])}, ...) do not correspond to the dataset's classes "
            f"({', '.join(classes[:3])}, ...).",
            hint="Pass --against-label-map FILE with lines of a dataset class and a label of the second model.",
        )
    indices = match_classes(classes, model.labels, has_names=model.has_names, label_map=label_map)
    return _Matched(name=name, model=model, indices=indices)


def _compare_models(
    first: _Matched, first_outputs: ModelOutputs, second: _Matched, second_outputs: ModelOutputs, classes: Sequence[str]
) -> dict[str, Any]:
    """Return the paired difference of two models, and the images on which their predictions differ."""
    if not torch.equal(first_outputs.indices, second_outputs.indices):
        raise DataError("The two models cannot read the same images, so they cannot be compared.")
    have_same_labels = first.model.labels == second.model.labels
    predictions: list[list[str]] = []
    for matched, outputs in ((first, first_outputs), (second, second_outputs)):
        names = matched.model.labels if have_same_labels else matched.class_names(classes)
        predictions.append([names[index] for index in outputs.outputs.argmax(1).tolist()])
    labels = [first.model.labels[int(label)] if label.ndim == 0 else "" for label in first_outputs.labels]
    disagreements = [
        {"file": key, "label": label, "first": ours, "second": theirs}
        for key, label, ours, theirs in zip(first_outputs.keys, labels, *predictions, strict=True)
        if ours != theirs
    ]
    difference = compare(first_outputs.correct, second_outputs.correct)
    return {
        "model": second.name,
        **asdict(difference),
        "is_clear": difference.is_clear,
        "disagreements": len(disagreements),
        "examples": disagreements[:MAX_EXAMPLES],
        "top1": second_outputs.correct.double().mean().item(),
    }
