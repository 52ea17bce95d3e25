"""The baseline of a fine-tuning: few-shot regression and nearest neighbors on the features of its checkpoint."""

from collections.abc import Generator, Sequence

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.scan import Progress
from vitral.data.splits import Splits
from vitral.evaluation.frozen_features import score_features
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs, make_loader, run_model
from vitral.model.cost import count_cost
from vitral.training.events import Baseline, Event, Measuring, Warned

SHOTS, NEIGHBORS = 10, 10
MIN_VALIDATION_IMAGES = 5
MAX_IMAGES = 5000
"""They have to be decoded, too."""
_MAX_FLOPS = {"cpu": 2e12, "cuda": 2e14, "mps": 2e13}  # some seconds


def measure_features(model: LoadedModel, dataset: DatasetIndex, splits: Splits) -> Generator[Event, None, None]:
    """Yield a Baseline measured on a sample of the images, or a Warned event that gives the reason for none."""
    flops = count_cost(model.model.config).forward_flops
    affordable = min(MAX_IMAGES, int(_MAX_FLOPS[model.device.type] / flops))
    validation = take_evenly(splits.validation, affordable // 3)
    train = take_evenly(splits.train, affordable - len(validation))
    if len(train) < 2 * len(dataset.classes) or len(validation) < MIN_VALIDATION_IMAGES:
        is_slow = len(splits.train) > len(train) or len(splits.validation) > len(validation)
        reason = "it would take too long on this device" if is_slow else "there are too few images"
        yield Warned(message=f"No baseline from the features of the checkpoint: {reason}.")
        return
    total = len(train) + len(validation)
    features: list[ModelOutputs] = []
    for items, before in ((train, 0), (validation, len(train))):
        progress = run_model(make_loader(model, items), model.features)
        features.append((yield from measuring(progress, "baseline", before=before, total=total)))
    k = min(NEIGHBORS, len(features[0].outputs))
    scores = score_features(features[0], features[1], classes=len(dataset.classes), shots=[SHOTS], k=k)
    yield Baseline(
        few_shot=scores["few_shot"]["top1"],
        knn=scores["knn"]["top1"],
        train_images=len(features[0].outputs),
        images=len(features[1].outputs),
    )


def measuring(
    progress: Generator[Progress, None, ModelOutputs], what: str, *, before: int = 0, total: int | None = None
) -> Generator[Event, None, ModelOutputs]:
    """Re-emit loader progress as Measuring events; `before` images of `total` are done already."""
    while True:
        try:
            event = next(progress)
        except StopIteration as end:
            return end.value
        yield Measuring(what=what, done=before + event.done, total=total or event.total)


def take_evenly(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Return at most `count` items, spread evenly over all."""
    if len(items) <= count:
        return tuple(items)
    return tuple(items[index * len(items) // count] for index in range(count))
