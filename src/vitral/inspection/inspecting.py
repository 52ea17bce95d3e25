"""Inspect a loaded model: collect everything that the page, the PNGs and the JSON file show."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitral.data.transforms import normalize
from vitral.errors import ConfigError, did_you_mean
from vitral.inference.loaded_model import LoadedModel
from vitral.inspection.attention_maps import attention_distance, rollout
from vitral.inspection.attention_tables import tabulate_attention
from vitral.inspection.class_relevance import relevance
from vitral.inspection.deletion import delete_patches, score_curves
from vitral.inspection.learned import patch_filters, position_similarity
from vitral.inspection.results import ClassMap, InspectedImage, Inspection, plain_faithfulness
from vitral.inspection.token_maps import feature_pca, token_norms, token_similarity
from vitral.inspection.traversal import attention_bytes, check_vit, patch_pixels, relevance_bytes
from vitral.model.vit import ViT

MAX_SHOWN, MAX_CLASSES = 8, 3
"""Images on the page, and classes with a relevance map per image."""
ROLLOUT = {
    "token": "from the class token",
    "mean": "from the mean of all patches, because this model pools by the mean",
    "token+mean": "from the class token and the mean of all patches, half each, as this model pools",
    "map": "from the probe of attention pooling, by the mean of its heads",
    "none": "from the mean of all patches, because this model has an output per token",
}
RELEVANCE = {
    "token": "from the class token",
    "mean": "from the patches, each by its positive contribution to the logit",
    "token+mean": "from the class token and the patches, each by its positive contribution to the logit",
    "map": "from the probe of attention pooling, by its gradient-weighted attention",
}
METHODS = {"rollout": rollout, "relevance": relevance}
"""The maps whose faithfulness is measured."""
Report = Callable[[str], None]


def inspect_model(
    loaded: LoadedModel,
    name: str,
    images: Iterable[tuple[str, Tensor]],
    *,
    labels: Sequence[str] = (),
    with_faithfulness: bool = False,
    on_stage: Report = lambda stage: None,
) -> Inspection:
    """Return what a model does with images (names and uint8 tensors) and what it learned.

    `labels` are classes whose relevance is shown instead of the most probable ones. A few images are in memory at a
    time: those that are shown, and the next ones for the means over all images."""
    model = check_vit(loaded.model)
    classes = [_class_index(loaded, label) for label in labels]
    if labels or with_faithfulness:
        loaded.check_has_head()
    shown: list[tuple[str, Tensor]] = []
    count, distance = 0, 0.0
    curves, random = (
        {method: list[Tensor]() for method in METHODS},
        {method: torch.Generator().manual_seed(0) for method in METHODS},
    )
    remaining = iter(images)
    while batch := list(islice(remaining, MAX_SHOWN)):
        shown, count = shown or batch, count + len(batch)
        inputs = _normalized(loaded, batch)
        on_stage(f"measuring how far heads look (image {count})")
        distance = distance + len(batch) * attention_distance(model, inputs).double().cpu().numpy()
        for method, compute in METHODS.items() if with_faithfulness else ():
            on_stage(f"deleting patches by {method} (image {count})")
            maps, generator = compute(model, inputs), random[method]
            curves[method] += delete_patches(model, inputs, maps, multi_label=loaded.multi_label, random=generator)
    inspected = _inspect_images(loaded, model, shown, classes, on_stage)
    on_stage("reading positions and filters")
    filters = patch_filters(model)
    return Inspection(
        name=name,
        model=_describe(model),
        definitions=_define(model, inspected, count),
        images=tuple(inspected),
        distance=np.asarray(distance / count),
        distance_images=count,
        position_similarity=_positions(model),
        filters=filters.components.cpu().numpy(),
        filters_explained=filters.explained.cpu().numpy(),
        faithfulness={method: plain_faithfulness(score_curves(rows)) for method, rows in curves.items() if rows},
    )


def _normalized(loaded: LoadedModel, images: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    return [normalize(image.to(loaded.device), loaded.preprocess) for _, image in images]


def _inspect_images(
    loaded: LoadedModel, model: ViT, images: Sequence[tuple[str, Tensor]], classes: list[int], on_stage: Report
) -> list[InspectedImage]:
    inputs = _normalized(loaded, images)
    on_stage("following attention")
    rollouts, tables = rollout(model, inputs), tabulate_attention(model, inputs)
    on_stage("reading tokens")
    norms, similarity, colors = token_norms(model, inputs), token_similarity(model, inputs), feature_pca(model, inputs)
    largest = max(relevance_bytes(model.config, (rows, columns)) for rows, columns in (map.shape for map in rollouts))
    on_stage(f"computing relevance ({_megabytes(largest)} per image)")
    classified = [_classify(loaded, model, image, classes) for image in inputs]
    return [
        InspectedImage(
            name=name,
            pixels=pixels.permute(1, 2, 0).cpu().numpy(),
            grid=(rollouts[index].shape[0], rollouts[index].shape[1]),
            rollout=rollouts[index].cpu().numpy(),
            predictions=classified[index][0],
            relevance=classified[index][1],
            features=colors[index].cpu().numpy(),
            norms=norms[index].cpu().numpy(),
            similarity=similarity[index].cpu().numpy(),
            attention=tables[index],
        )
        for index, (name, pixels) in enumerate(images)
    ]


def _classify(
    loaded: LoadedModel, model: ViT, image: Tensor, classes: list[int]
) -> tuple[tuple[tuple[str, float], ...], tuple[ClassMap, ...]]:
    """Return the most probable labels, and the relevance for the requested classes, or for those labels."""
    if not model.config.num_classes or model.config.pool == "none":
        return (), ()
    with torch.inference_mode():
        probabilities = loaded.probabilities(cast("Tensor", model(image[None])).float())[0].cpu()
    best: list[int] = probabilities.topk(min(MAX_CLASSES, len(probabilities))).indices.tolist()
    chosen = classes or best
    maps = relevance(model, image[None].expand(len(chosen), -1, -1, -1), chosen)
    by_class = tuple(
        ClassMap(label=loaded.labels[index], probability=float(probabilities[index]), map=map.cpu().numpy())
        for index, map in zip(chosen, maps, strict=True)
    )
    return tuple((loaded.labels[index], float(probabilities[index])) for index in best), by_class


def _class_index(loaded: LoadedModel, label: str) -> int:
    if label not in loaded.labels:
        hint = did_you_mean(label, loaded.labels) or f"Its labels are {', '.join(loaded.labels[:5])}, ..."
        raise ConfigError(f"The model has no label {label!r}.", hint=hint)
    return loaded.labels.index(label)


def _positions(model: ViT) -> np.ndarray | None:
    return position_similarity(model).cpu().numpy() if len(model.positions) else None


def _describe(model: ViT) -> dict[str, Any]:
    config = model.config
    return {
        "layers": config.blocks,
        "heads": config.heads,
        "width": config.width,
        "patch": list(patch_pixels(config)),
        "image_size": list(config.image_hw),
        "pool": config.pool,
        "position": config.position,
        "registers": config.registers,
        "class_token": config.has_class_token,
        "attention": config.attention,
        "filters_of": "patch projection" if config.stem is None else "first convolution",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _define(model: ViT, images: Sequence[InspectedImage], count: int) -> dict[str, str]:
    """Return sentences: how the maps are defined for this model, and what the page leaves out."""
    config, largest = model.config, max((image.grid for image in images), key=lambda grid: grid[0] * grid[1])
    sentences = {
        "rollout": f"Rollout starts {ROLLOUT[config.pool]}. Each layer is the mean of its heads and the identity, half "
        "each. The share of class token and registers is left out, and each map sums to 1.",
        "memory": f"One layer of attention takes {_megabytes(attention_bytes(config, largest))} per image. "
        "Relevance keeps all layers and what their gradients need: about "
        f"{_megabytes(relevance_bytes(config, largest))} per image.",
    }
    if config.pool in RELEVANCE and config.num_classes:
        sentences["relevance"] = (
            f"Relevance starts {RELEVANCE[config.pool]}. Each layer is the identity plus the mean over heads of "
            "attention times its gradient, without negative values (Chefer et al. 2021)."
        )
    if config.attention == "axial":
        sentences["axial"] = "Axial attention has two blocks per layer: one along rows, then one along columns."
    table, left_out = images[0].attention, list[str]()
    if len(table.layers) < config.blocks:
        left_out.append(f"{len(table.layers)} of {config.blocks} layers")
    if table.grid != images[0].grid:
        left_out.append(
            f"a grid of {table.grid[0]} x {table.grid[1]} instead of {images[0].grid[0]} x {images[0].grid[1]}"
        )
    if len(images) < count:
        left_out.append(f"{len(images)} of {count} images")
    if left_out:
        sentences["reduced"] = f"To keep this file small, it shows attention of {', '.join(left_out)}, in 8 bits."
    return sentences


def _megabytes(number: int) -> str:
    if number < 1e6:
        return f"{number / 1e3:,.0f} kB"
    return f"{number / 1e6:,.1f} MB" if number < 1e9 else f"{number / 1e9:,.1f} GB"
