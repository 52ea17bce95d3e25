"""Evaluate a model's frozen features by few-shot regression and nearest neighbors, with features cached on disk."""

import hashlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitral.data.dataset import Item
from vitral.data.scan import Progress
from vitral.errors import ConfigError, DataError
from vitral.evaluation.evaluation_data import EvaluationData
from vitral.evaluation.feature_cache import cache_key, is_cached, keep_features, model_digest, read_features
from vitral.evaluation.few_shot import SEEDS, ShotPool, choose_shots, score_features
from vitral.evaluation.label_map import match_classes
from vitral.evaluation.metrics import Scores, score
from vitral.evaluation.options import EvaluateOptions
from vitral.evaluation.results import Evaluation, summarize_features
from vitral.inference.pipeline import ModelOutputs, make_loader, run_model

if TYPE_CHECKING:
    from vitral.inference.loaded_model import LoadedModel


def evaluate_features(
    model: "LoadedModel", data: EvaluationData, options: EvaluateOptions
) -> Generator[Progress, None, Evaluation]:
    """Yield progress and return the scores of the features. Few-shot regression computes only the images it draws."""
    if data.dataset.multi_label:
        raise ConfigError("few_shot and knn need one label per image, but this dataset is multi-label.")
    if not data.train:
        raise DataError("few_shot and knn need a train split, but this dataset has none.")
    labels = torch.tensor([item.label for item in data.train])
    notes = (*model.warnings, *_notes_on_shots(labels, data.dataset.classes, options.shots))
    digest = model_digest(model) if options.cache else None
    wanted = torch.arange(len(labels))
    if options.knn is None and not (digest and is_cached(cache_key(digest, data.train))):
        wanted = torch.cat([choose_shots(labels, max(options.shots), seed) for seed in SEEDS]).unique()
    start = time.perf_counter()
    train, computed_train = yield from _features(model, [data.train[i] for i in wanted.tolist()], options, digest)
    test, computed_test = yield from _features(model, data.test, options, digest)
    seconds, computed = time.perf_counter() - start, computed_train + computed_test
    rows = torch.full_like(labels, -1)
    rows[wanted[train.indices]] = torch.arange(len(train.indices))
    pool = ShotPool(labels=labels, rows=rows)
    classes = len(data.dataset.classes)
    scores = score_features(train, test, classes=classes, shots=options.shots, k=options.knn, pool=pool)
    classifier = _classifier_scores(model, test, data, options)
    evaluation = summarize_features(scores, classifier, unreadable=train.unreadable + test.unreadable)
    return replace(evaluation, images_per_second=computed / seconds if computed else None, notes=notes)


def _classifier_scores(
    model: "LoadedModel", test: ModelOutputs, data: EvaluationData, options: EvaluateOptions
) -> Scores:
    """Return the scores of the model's own head on the same features; NaN if it has none for these classes."""
    without = Scores(images=len(test.outputs), loss=nan, top1=nan, top5=nan)
    if not model.model.config.num_classes:
        return without
    try:
        indices = match_classes(
            data.dataset.classes, model.labels, has_names=model.has_names, label_map=options.label_map
        )
    except DataError:
        return without
    return score(model.classify(test.outputs), torch.tensor(indices)[test.labels])


def _features(
    model: "LoadedModel", items: Sequence[Item], options: EvaluateOptions, digest: "hashlib._Hash | None"
) -> Generator[Progress, None, tuple[ModelOutputs, int]]:
    """Return the features of the images, and how many images were computed rather than read from the cache."""
    key = None if digest is None else cache_key(digest, items)
    if key is not None and (cached := read_features(key, items)) is not None:
        return cached, 0
    loader = make_loader(model, items, batch_size=options.batch_size, workers=options.workers)
    features = yield from run_model(loader, model.features)
    model.check_finite(features.outputs)
    if key is not None:
        keep_features(key, features)
    return features, len(items)


def _notes_on_shots(labels: Tensor, classes: Sequence[str], shots: Sequence[int]) -> Iterator[str]:
    """Yield a note if some classes have too few images. Raise ConfigError if all have."""
    counts = labels.bincount(minlength=len(classes)).tolist()
    if shots and min(shots) > max(counts):
        raise ConfigError(f"few_shot must be at most {max(counts)}, the size of the largest class (got {min(shots)}).")
    wanted = max(shots, default=0)
    fewer = [f"{name} has {count}" for name, count in zip(classes, counts, strict=True) if count < wanted]
    if fewer:
        examples = f"{', '.join(fewer[:5])}{', ...' if fewer[5:] else ''}"
        yield f"not all classes have {wanted} training images: {examples}"
