"""Draw, for the report of a run, which patches speak for the predictions on some test images."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitral.collectives import current_world
from vitral.data.contact_sheet import CELL
from vitral.data.dataset import Item
from vitral.data.headers import BadImageError
from vitral.data.transforms import normalize, preprocess_image
from vitral.errors import first_line
from vitral.evaluation.results import join_labels
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs
from vitral.inspection.class_relevance import relevance
from vitral.inspection.overlays import covered_part, heat
from vitral.inspection.traversal import patch_pixels
from vitral.model.vit import ViT
from vitral.runs import Run

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
        if _is_sharded(loaded.model):
            if not current_world().is_first:
                return
            loaded = load_model(run.folder, device=str(loaded.device))  # a process alone needs all weights
        if isinstance(loaded.model, ViT):
            _draw(loaded, loaded.model, run, report, items, seconds)
    except Exception as error:
        run.add_log(f"relevance was not drawn: {type(error).__name__}: {first_line(error)}")


def relevance_files(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the file name of each overlay with its row of the report: mistakes and typical images by turns."""
    by_kind = [
        [(f"relevance-{name}-{number:02d}.png", row) for number, row in enumerate(report.get(kind) or (), 1)]
        for kind, name in (("mistakes", "mistake"), ("typical", "typical"))
    ]
    yield from (pair for pair in chain.from_iterable(zip_longest(*by_kind)) if pair is not None)


def _draw(
    loaded: LoadedModel, model: ViT, run: Run, report: Mapping[str, Any], items: Mapping[str, Item], seconds: float
) -> None:
    end = time.perf_counter() + seconds
    for file, row in relevance_files(report):
        if time.perf_counter() > end:
            run.add_log(f"relevance: stopped after {seconds:.0f} s, before {file}")
            return
        try:
            content = items[row["key"]].source.read()
            image = preprocess_image(content, loaded.preprocess, patch=model.config.step_hw)
        except BadImageError:  # it was readable a moment ago; the report can do without
            continue
        _draw_overlay(loaded, model, image, row["prediction"], run.plots / file)


def _draw_overlay(loaded: LoadedModel, model: ViT, image: Tensor, label: str, path: Path) -> None:
    inputs = normalize(image[None].to(loaded.device), loaded.preprocess)
    maps = relevance(model, inputs, [loaded.labels.index(label)])
    pixels, map = image.permute(1, 2, 0).numpy(), maps[0].cpu().numpy()
    covered = covered_part((pixels.shape[0], pixels.shape[1]), (map.shape[0], map.shape[1]), patch_pixels(model.config))
    overlay = heat(pixels, map, CELL, covered)
    Image.fromarray(overlay).save(path)


def _is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the weights are split between processes, which run forward passes together only."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
