"""Draw, for the report of a run, which patches speak for the predictions on some test images."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any

from PIL import Image
from torch import Tensor

from vitral.collectives import from_first
from vitral.data.contact_sheet import CELL
from vitral.data.dataset import Item
from vitral.data.headers import BadImageError, Pixels
from vitral.data.transforms import normalize, preprocess_image
from vitral.errors import first_line
from vitral.evaluation.results import join_labels
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs
from vitral.inspection.class_relevance import relevance
from vitral.inspection.overlays import covered_part, heat
from vitral.inspection.traversal import patch_pixels
from vitral.model.vit import ViT
from vitral.runs import Run
from vitral.training.sharding import root_of, run_with

MAX_TYPICAL = 120
"""So that 1,000 classes do not make a huge report."""


def typical_images(outputs: ModelOutputs, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return one image per class, at most 120: of those predicted correctly, the one with the median probability.

    On multi-label data, the images of a class are those that have the label, with a probability above 0.5."""
    logits, labels, keys = outputs.outputs, outputs.labels, outputs.keys
    is_multi_label = labels.ndim == 2
    probabilities = logits.sigmoid() if is_multi_label else logits.softmax(dim=1)
    hits = (labels > 0) & (logits > 0) if is_multi_label else logits.argmax(dim=1) == labels
    rows = list[dict[str, Any]]()
    for index, name in enumerate(classes):
        correct = (hits[:, index] if is_multi_label else hits & (labels == index)).nonzero()[:, 0]
        if len(correct) and len(rows) < MAX_TYPICAL:
            chosen = int(correct[probabilities[correct, index].argsort()[len(correct) // 2]])
            label, probability = join_labels(labels[chosen], classes), float(probabilities[chosen, index])
            rows.append({"key": keys[chosen], "label": label, "prediction": name, "probability": probability})
    return rows


def draw_relevance(
    loaded: LoadedModel, run: Run, report: Mapping[str, Any], items: Mapping[str, Item], *, seconds: float
) -> None:
    """Draw the relevance of the mistakes and of the typical images, until so many seconds are over.

    A large model on a CPU gets fewer overlays instead of a late report. A failure goes to the log, never to the run.
    """
    try:
        if isinstance(loaded.model, ViT):
            overlays = _overlays(loaded, loaded.model, run, report, items, seconds)
            if root_of(loaded.model) is not None:  # all processes compute all of them together
                overlays = list(overlays)
            for file, overlay in overlays:
                Image.fromarray(overlay).save(run.plots / file)
    except Exception as error:
        run.add_log(f"relevance was not drawn: {type(error).__name__}: {first_line(error)}")


def relevance_files(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the file name of each overlay with its row of the report: mistakes and typical images by turns."""
    by_kind = [
        [(f"relevance-{name}-{number:02d}.png", row) for number, row in enumerate(report.get(kind) or (), 1)]
        for kind, name in (("mistakes", "mistake"), ("typical", "typical"))
    ]
    yield from (pair for pair in chain.from_iterable(zip_longest(*by_kind)) if pair is not None)


def _overlays(
    loaded: LoadedModel, model: ViT, run: Run, report: Mapping[str, Any], items: Mapping[str, Item], seconds: float
) -> Iterator[tuple[str, Pixels]]:
    end = time.perf_counter() + seconds
    for file, row in relevance_files(report):
        image: Tensor | None = None
        is_late = time.perf_counter() > end
        with suppress(BadImageError):  # it was readable a moment ago; the report can do without
            content = items[row["key"]].source.read()
            image = preprocess_image(content, loaded.preprocess, patch=model.config.step_hw)
        if root_of(model) is not None:
            is_late, image = from_first((is_late, image))
        if is_late:
            run.add_log(f"relevance: stopped after {seconds:.0f} s, before {file}")
            return
        if image is not None:
            yield file, _overlay(loaded, model, image, row["prediction"])


def _overlay(loaded: LoadedModel, model: ViT, image: Tensor, label: str) -> Pixels:
    inputs = normalize(image[None].to(loaded.device), loaded.preprocess)
    maps = run_with(model, relevance, model, inputs, [loaded.labels.index(label)])
    pixels, map = image.permute(1, 2, 0).numpy(), maps[0].cpu().numpy()
    covered = covered_part((pixels.shape[0], pixels.shape[1]), (map.shape[0], map.shape[1]), patch_pixels(model.config))
    return heat(pixels, map, CELL, covered)
