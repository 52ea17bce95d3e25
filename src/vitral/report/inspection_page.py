"""Write an inspection: one HTML page that works offline, PNGs of its figures, and the numbers as JSON."""

import base64
import hashlib
import json
import os
import zlib
from html import escape
from importlib.resources import files
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitral.errors import ConfigError, VitralError
from vitral.files import as_text, printable, write_json, write_text
from vitral.inspection.overlays import TINY, covered_part, to_rgb, with_contrast
from vitral.report.inspection_figures import FIGURES, draw_figures

if TYPE_CHECKING:
    from vitral.inspection.results import AttentionTable, InspectedImage, Inspection

PAGE, NUMBERS = "inspect.html", "inspect.json"
MAX_PHOTO_SIDE, MAX_POSITION_SIDE = 640, 16
LONG_TOKEN = 3.0
"""The length of a token, in medians of its layer, that has the brightest color."""


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if the folder cannot be used or already holds an inspection."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{existing} is not a folder.", hint="Pass another --out.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{existing} is not writable.", hint="Pass another --out.")
    for name in () if overwrite else (PAGE, NUMBERS, *FIGURES):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} already exists.", hint="Pass another --out, or --overwrite.")


def write_inspection(inspection: "Inspection", folder: Path) -> Path:
    """Write the page, the JSON file and the PNGs. Return the path of the page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot create {folder}: {error.strerror}.", hint="Pass another --out.") from error
    write_json(folder / NUMBERS, inspection.as_dict(), VitralError)
    draw_figures(inspection, folder)
    write_text(folder / PAGE, render_inspection(inspection), VitralError)
    return folder / PAGE


def render_inspection(inspection: "Inspection") -> str:
    """Return the page. Its script may only be the one of this package: the policy names its hash."""
    assets = files("vitral.report") / "assets"
    style, script, page = ((assets / f"inspect.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = json.dumps(_payload(inspection), separators=(",", ":"))
    parts = {
        "hash": f"sha256-{digest}",
        "title": escape(_name(f"Inside {inspection.name}")),
        "style": style,
        "data": values.replace("<", "\\u003c"),  # no name can end the element
        "script": script,
    }
    before, *pieces = page.split("{{")
    return before + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces))


def _payload(inspection: "Inspection") -> dict[str, Any]:
    """Return everything that the script draws."""
    model = dict(inspection.model)
    return {
        "name": _name(inspection.name),
        "model": model,
        "definitions": dict(inspection.definitions),
        "distance": np.round(inspection.distance.astype(float), 3).tolist(),
        "distance_images": inspection.distance_images,
        "uniform_distance": _uniform_distances(inspection),
        "positions": _positions(inspection.position_similarity),
        "filters": {
            "tiles": [png_data(filter_image(component)) for component in inspection.filters],
            "explained": np.round(inspection.filters_explained.astype(float), 5).tolist(),
            "of": model["filters_of"],
        },
        "faithfulness": dict(inspection.faithfulness),
        "images": [_image(image, model["patch"]) for image in inspection.images],
    }


def _image(image: "InspectedImage", patch: tuple[int, int]) -> dict[str, Any]:
    medians = np.median(image.norms, axis=(1, 2))
    lengths = image.norms / np.maximum(medians, 1e-12)[:, None, None] / LONG_TOKEN
    height, width = image.size
    return {
        "name": _name(Path(image.name).name or image.name),
        "src": photo_data(image.pixels),
        "height": height,
        "width": width,
        "pixelated": max(height, width) < TINY,
        "grid": list(image.grid),
        "covered": covered_part(image.size, image.grid, patch),
        "rollout": _base64(to_bytes(with_contrast(image.rollout))),
        "predictions": [
            {"label": _name(label), "probability": round(probability, 4)} for label, probability in image.predictions
        ],
        "relevance": [
            {
                "label": _name(row.label),
                "probability": round(row.probability, 4),
                "map": _base64(to_bytes(with_contrast(row.map))),
            }
            for row in image.relevance
        ],
        "features": _base64(to_bytes(image.features)),
        "norms": _base64(to_bytes(lengths)),
        "norm_median": np.round(medians.astype(float), 3).tolist(),
        "norm_maximum": np.round(image.norms.max(axis=(1, 2)).astype(float), 3).tolist(),
        "similarity": np.round(image.similarity.astype(float), 4).tolist(),
        "attention": _table(image.attention),
    }


def _table(table: "AttentionTable") -> dict[str, Any]:
    return {
        "grid": list(table.grid),
        "extras": list(table.extras),
        "layers": list(table.layers),
        "values": _compressed(table.values),
        "maxima": _compressed(table.maxima.astype("<f4")),
        "on_patches": _compressed(table.on_patches.astype("<f4")),
    }


def _positions(similarity: np.ndarray | None) -> dict[str, Any] | None:
    """Return the similarities, every second or third position of a large grid."""
    if similarity is None:
        return None
    step = max(1, ceil(max(similarity.shape) / MAX_POSITION_SIDE))
    shown = similarity[::step, ::step, ::step, ::step]
    low = float(shown.min())
    scaled = (shown - low) / max(1 - low, 1e-12)
    note = "" if step == 1 else f" The figure has one of {step} x {step} positions."
    return {"grid": list(shown.shape[:2]), "values": _base64(to_bytes(scaled)), "note": note}


def _uniform_distances(inspection: "Inspection") -> float | None:
    """Return the mean over the shown images; None for axial attention, whose queries see one line."""
    if inspection.model["attention"] == "axial":
        return None
    patch = inspection.model["patch"]
    return round(float(np.mean([uniform_distance(image.grid, patch) for image in inspection.images])), 3)


def uniform_distance(grid: tuple[int, int], pixels: list[int]) -> float:
    """Return the mean distance in pixels between all pairs of patches."""
    y, x = (np.arange(count) * side for count, side in zip(grid, pixels, strict=True))
    down, across = np.abs(y[:, None] - y).ravel(), np.abs(x[:, None] - x).ravel()
    return round(float(np.hypot(down[:, None], across).mean()), 3)


def filter_image(component: np.ndarray) -> np.ndarray:
    """Return a filter (C, h, w) as colors (h, w, 3): gray is zero."""
    pixels = to_rgb(component.transpose(1, 2, 0))
    return to_bytes(0.5 + 0.5 * pixels / max(np.abs(pixels).max(), 1e-12))


def photo_data(pixels: np.ndarray) -> str:
    """Return an image as a data URI: PNG if it is tiny, else JPEG."""
    image = Image.fromarray(np.ascontiguousarray(to_rgb(pixels)))
    if max(image.size) < TINY:
        return png_data(np.asarray(image))
    image.thumbnail((MAX_PHOTO_SIDE, MAX_PHOTO_SIDE))
    stream = BytesIO()
    image.save(stream, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def png_data(pixels: np.ndarray) -> str:
    stream = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Return values from 0 to 1 in 8 bits."""
    return (np.nan_to_num(values).clip(0, 1) * 255).round().astype(np.uint8)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _compressed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def _name(text: str) -> str:
    """Return a name without control characters, which the script sets as text."""
    return printable(as_text(text))
