"""Compute predictions, features and attention maps of preprocessed images in a worker, as JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.headers import Header
from vitral.data.transforms import normalize, resized_size
from vitral.inference.engines.torch_eager import as_tensor
from vitral.inference.exported_model import ExportedModel
from vitral.inference.predictor import Predictor
from vitral.inspection import relevance, rollout
from vitral.model.recording import record_attention
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.serving.refusals import RequestError
from vitral.serving.settings import METHODS, ModelSource

MAX_MAP_VALUES = 2_000_000
"""Numbers in one response with attention maps; about 15 MB of JSON."""


def load_predictor(source: ModelSource) -> Predictor:
    """Load the model as `vitral predict` does."""
    options: dict[str, Any] = dict(device=source.device, precision=source.precision, image_size=source.image_size)
    options["on_choice"] = lambda reason: print(f"vitral: {source.name}: {reason}", file=sys.stderr)
    return Predictor(source.source, engine=source.engine, **options)


def describe_model(predictor: Predictor, source: ModelSource) -> dict[str, Any]:
    """Return what the page and `GET /api/model` show."""
    loaded = predictor.loaded
    engine, precision = predictor.engine.split()
    common = {
        "name": source.name,
        "has_names": loaded.has_names,
        "multi_label": loaded.multi_label,
        "preprocess": loaded.preprocess.as_dict(),
        "precision": precision,
        "engine": engine,
        "can_detect_unusual": predictor.novelty is not None,
        "warnings": list(loaded.warnings),
    }
    if isinstance(loaded, ExportedModel):
        hidden: dict[str, Any] = {"parameters": None, "width": None, "layers": 0, "heads": 0, "methods": []}
        labels, size = list(loaded.labels), list(loaded.preprocess.size)
        shown = {"labels": labels, "architecture": "exported file", "image_size": size, "device": "cpu"}
        tasks = {"can_predict": "logits" in loaded.outputs, "can_embed": "features" in loaded.outputs}
        return common | hidden | shown | tasks
    config, network = loaded.model.config, find_network(predictor)
    methods = [name for name in METHODS if predictor.can_predict or name != "relevance"]
    return common | {
        "labels": list(predictor.labels) if config.num_classes else [],
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "architecture": type(loaded.model).__name__,
        "width": getattr(config, "width", None),
        "layers": len(network.blocks) if network else 0,
        "heads": network.config.heads if network else 0,
        "image_size": list(config.image_hw),
        "device": str(loaded.device),
        "can_predict": predictor.can_predict,
        "can_embed": config.pool != "none",
        "methods": methods if network else [],
    }


def find_network(predictor: Predictor) -> ViT | None:
    """Return the network that attention maps are computed from; None for BiTs, merged tokens and exported files."""
    loaded = predictor.loaded
    model = None if isinstance(loaded, ExportedModel) else loaded.model
    return model if isinstance(model, ViT) and not model.config.merge else None


class Computer:
    """Run tasks on batches of preprocessed images and return a JSON object per image."""

    def __init__(self, predictor: Predictor, *, reject: float):
        self.predictor, self.network = predictor, find_network(predictor)
        self.reject = reject
        self.tasks: dict[str, Callable[[Sequence[np.ndarray], Sequence[dict[str, Any]]], list[bytes]]] = {
            "predict": self.predict,
            "features": self.features,
            "attention": self.attention,
        }

    def predict(self, images: Sequence[np.ndarray], options: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the most probable labels of each image."""
        predictions = self.predictor.predict_prepared(images)
        rows = []
        for prediction, option in zip(predictions, options, strict=True):
            top = [{"label": label, "probability": value} for label, value in prediction.top(option["top_k"])]
            row: dict[str, Any] = {"label": prediction.label, "probability": prediction.probability, "top": top}
            if prediction.unusual is not None:
                row |= {"unusual": prediction.unusual, "rejected": prediction.unusual >= self.reject}
            rows.append(json.dumps(row).encode())
        return rows

    def features(self, images: Sequence[np.ndarray], options: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the embedding of each image: the input of the head."""
        rows = self.predictor.features_prepared(images)
        return [json.dumps({"features": [float(value) for value in row]}).encode() for row in rows]

    def attention(self, images: Sequence[np.ndarray], options: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return a map per layer and head for each image, or one map of all layers together."""
        return [self._map(image, option) for image, option in zip(images, options, strict=True)]

    def _map(self, image: np.ndarray, option: dict[str, Any]) -> bytes:
        model = self.network
        if model is None:
            raise RequestError(501, "no_attention", "This model has no attention maps.")
        rows, columns = model.config.grid(*image.shape[1:])
        device = next(model.parameters()).device
        batch = normalize(as_tensor(image)[None].to(device), self.predictor.loaded.preprocess)
        content: dict[str, Any] = {"method": option["method"], "rows": rows, "columns": columns}
        if option["method"] == "attention":
            maps = attention_maps(model, batch, option.get("layer"), (rows, columns))
            content |= {"layers": [{"layer": layer, "heads": heads} for layer, heads in maps.items()]}
        else:
            content |= {"map": self._joined_map(model, option, batch)}
        return json.dumps(content).encode()

    def _joined_map(self, model: ViT, option: dict[str, Any], batch: Tensor) -> list[list[float]]:
        if option["method"] == "rollout":
            return _rounded(rollout(model, batch)[0])
        label = option.get("label")
        if label is not None and not 0 <= label < len(self.predictor.labels):
            raise RequestError(400, "invalid_parameter", "label must be the index of a label.")
        values = relevance(model, batch, label)[0].clamp(min=0)
        return _rounded(values / values.sum().clamp(min=1e-12))


def attention_maps(
    model: ViT, batch: Tensor, layer: int | None, grid: tuple[int, int]
) -> dict[int, list[list[list[float]]]]:
    """Return the attention from the class token to each patch (rows, columns) by layer and head.

    Models without a class token get the mean attention that each patch receives. Axial layers attend within rows or
    columns only, so that their maps have zeros.
    """
    depth = len(model.blocks)
    if layer is not None and not -depth <= layer < depth:
        raise RequestError(400, "invalid_parameter", f"layer must be from {-depth} to {depth - 1}.")
    if (depth if layer is None else 1) * model.config.heads * grid[0] * grid[1] > MAX_MAP_VALUES:
        raise RequestError(400, "invalid_parameter", "This model has too many maps for one response. Pass a layer.")
    with torch.inference_mode(), record_attention(model, None if layer is None else layer) as maps:
        model.features(batch)
    chosen = range(depth) if layer is None else [layer % depth]
    return {number: _patch_maps(maps[number], model, grid) for number in chosen}


def _patch_maps(weights: Tensor | list[Tensor], model: ViT, grid: tuple[int, int]) -> list[list[list[float]]]:
    """Return (heads, rows, columns), each head normalized to a sum of 1."""
    attention = weights[0] if isinstance(weights, list) else weights
    first = attention[0, :, 0] if model.config.has_class_token else attention[0].mean(1)  # (heads, N)
    patches = first[:, first.shape[1] - grid[0] * grid[1] :].float().cpu()
    patches = patches / patches.sum(1, keepdim=True).clamp(min=1e-12)
    return [_rounded(head) for head in patches.reshape(-1, *grid)]


def _rounded(values: Tensor) -> list[list[float]]:
    return np.round(values.double().cpu().numpy(), 6).tolist()


def seen_box(header: Header, preprocess: Preprocess, patch: tuple[int, int]) -> dict[str, float]:
    """Return the region of the upright image that the model sees, in fractions of its width and height.

    With resize="pad" it is larger than the image.
    """
    height, width = resized_size(preprocess, (header.height, header.width), patch)
    if preprocess.resize not in ("crop", "pad"):
        return {"left": 0.0, "top": 0.0, "width": 1.0, "height": 1.0}
    down, across = preprocess.size
    if preprocess.resize == "crop":  # rounded as crop_or_pad rounds
        top, left = round((height - down) / 2), round((width - across) / 2)
    else:
        top, left = -((down - height) // 2), -((across - width) // 2)
    return {"left": left / width, "top": top / height, "width": across / width, "height": down / height}
