"""Hold the results of an inspection as arrays and plain values, which the report reads."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MAX_JSON_SIMILARITIES = 65_536
"""Larger tables of position similarities stay out of the JSON file."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AttentionTable:
    """The attention of chosen layers for every query of one image, on a grid that may be coarser than the patches."""

    grid: tuple[int, int]
    """(rows, columns) of queries and keys."""
    extras: tuple[str, ...]
    """Queries before the patches: "class token", "register 1" and so on."""
    layers: tuple[int, ...]
    """The blocks that were kept, from 0."""
    values: np.ndarray
    """(layers, heads, queries, patches) in uint8: the square root of the share of the row's maximum."""
    maxima: np.ndarray
    """(layers, heads, queries): the largest attention to a patch in each row."""
    on_patches: np.ndarray
    """(layers, heads, queries): the sum of the attention to patches; the rest goes to class token and registers."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ClassMap:
    """The relevance of an image for one class."""

    label: str
    probability: float
    map: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class InspectedImage:
    """The maps and scores of one image."""

    name: str
    pixels: np.ndarray
    """uint8 (H, W, C), as the model received it."""
    grid: tuple[int, int]
    rollout: np.ndarray
    """(rows, columns), sums to 1."""
    predictions: tuple[tuple[str, float], ...]
    """The most probable labels and their probabilities; empty for a model without a head."""
    relevance: tuple[ClassMap, ...]
    """One map per class: the most probable ones, or those that were requested."""
    features: np.ndarray
    """(rows, columns, 3): colors from 0 to 1."""
    norms: np.ndarray
    """(layers, rows, columns)."""
    similarity: np.ndarray
    """(layers,)."""
    attention: AttentionTable

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "grid": list(self.grid),
            "predictions": [{"label": label, "probability": _plain(value)} for label, value in self.predictions],
            "rollout": _plain(self.rollout, 6),
            "relevance": [
                {"label": row.label, "probability": _plain(row.probability), "map": _plain(row.map, 6)}
                for row in self.relevance
            ],
            "token_norms": {
                "median": _plain(np.median(self.norms, axis=(1, 2))),
                "maximum": _plain(self.norms.max(axis=(1, 2))),
            },
            "token_similarity": _plain(self.similarity),
        }


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Inspection:
    """The result of `vitral.inspect`."""

    name: str
    """The model's name."""
    model: Mapping[str, Any]
    """Facts about the network: layers, heads, width, patch, pool, parameters."""
    definitions: Mapping[str, str]
    """How rollout and relevance are defined for this pooling, and what was reduced."""
    images: tuple[InspectedImage, ...]
    distance: np.ndarray
    """(layers, heads) in pixels."""
    distance_images: int
    """How many images the distance is averaged over."""
    position_similarity: np.ndarray | None
    """(rows, columns, rows, columns); None if the model has no position embeddings."""
    filters: np.ndarray
    """(n, C, h, w)."""
    filters_explained: np.ndarray
    faithfulness: Mapping[str, Any]
    """A `Faithfulness` as plain values by the name of its map; empty unless requested."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Images that could not be used, each with the reason."""
    out: str = ""
    """The folder that the files were written to."""

    def __repr__(self) -> str:
        return f"<Inspection of {self.name}: {len(self.images)} images, written to {self.out or 'nothing'}>"

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        similarity = self.position_similarity
        has_similarity = similarity is not None and similarity.size <= MAX_JSON_SIMILARITIES
        return {
            "name": self.name,
            "model": dict(self.model),
            "definitions": dict(self.definitions),
            "attention_distance": {"pixels": _plain(self.distance), "images": self.distance_images},
            "position_similarity": _plain(similarity, 3) if has_similarity else None,
            "filters_explained": _plain(self.filters_explained),
            "faithfulness": dict(self.faithfulness),
            "images": [image.as_dict() for image in self.images],
            "skipped": [{"file": name, "error": reason} for name, reason in self.skipped],
        }


def _plain(values: "np.ndarray | float | None", digits: int = 4) -> Any:  # noqa: ANN401 (nested lists of numbers)
    """Return nested lists of rounded numbers, with None for NaN."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim:
        return [_plain(row, digits) for row in array]
    return round(float(array), digits) if np.isfinite(array) else None


def plain_faithfulness(result: Any) -> dict[str, Any]:  # noqa: ANN401 (the dataclass imports torch)
    """Return a Faithfulness as plain values, with None for NaN."""
    return {name: _plain(value, 5) if name != "images" else value for name, value in asdict(result).items()}
