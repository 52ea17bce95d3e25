"""Write the model card: what a model predicts, how good it is, how it was trained and how to use it."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from vitral.files import printable
from vitral.report.text import format_clock, format_count, format_percent, masked_patches_lines, summary_lines

MAX_LISTED_CLASSES = 30
MAX_WEAK_CLASSES = 3
MAX_NAME_LENGTH = 80
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$#@]|:(?=//)|(?<=www)\.)")


def render_card(name: str, report: Mapping[str, Any]) -> str:
    """Return the model card of a run as Markdown, from the content of its report.json."""
    if report.get("objective") == "masked-patches":
        return _pretraining_card(name, report)
    data, scores = report["data"], report["test"]
    classes = ", ".join(map(escape_markdown, data["classes"][:MAX_LISTED_CLASSES]))
    more = ", ..." if len(data["classes"]) > MAX_LISTED_CLASSES else ""
    return f"""# {escape_markdown(name)}

An image classifier with {report["parameters"]:,} parameters, trained on {escape_markdown(data["name"])}.
It predicts {format_count(len(data["classes"]), "class", "classes")}: {classes}{more}.

## Results

{_bullets(summary_lines(scores))}

{_weak_classes(scores)}These scores hold for images like those of the test split. {_output(data)}

## Training

{_training(report)}

## Usage

    vitral predict model.safetensors image.jpg

The file contains the weights, the class names and the preprocessing.
"""


def _pretraining_card(name: str, report: Mapping[str, Any]) -> str:
    return f"""# {escape_markdown(name)}

A Vision Transformer with {report["parameters"]:,} parameters, pretrained on {escape_markdown(report["data"]["name"])}
without labels by predicting masked patches. It has no classification head: it outputs features and can be fine-tuned.

## Results

{_bullets(masked_patches_lines(report["test"]))}

## Training

{_training(report)}

## Usage

    vitral train DATA --from model.safetensors
    vitral features model.safetensors IMAGES --out features.npz
    vitral evaluate model.safetensors DATA --knn 10
"""


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows literally: no markup, HTML, links, control characters or line breaks."""
    return _escape_sentence(text if len(text) <= MAX_NAME_LENGTH else f"{text[: MAX_NAME_LENGTH - 1]}…")


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {_escape_sentence(line)}" for line in lines)


def _escape_sentence(line: str) -> str:
    """Return a sentence of vitral's own, which may quote a name, as literal Markdown."""
    return _MARKDOWN.sub(r"\\\1", escape(printable(line), quote=False))


def _weak_classes(scores: Mapping[str, Any]) -> str:
    """Return the classes with the lowest recall, or "" if every image of every class was recognized."""
    rows = [row for row in scores["per_class"] if row["images"] and (row["recall"] or 0) < 1]
    weakest = sorted(rows, key=lambda row: row["recall"] or 0)[:MAX_WEAK_CLASSES]
    texts = [f"{escape_markdown(row['class'])} ({format_percent(row['recall'], 0)})" for row in weakest]
    return f"Lowest recall: {', '.join(texts)}. " if texts else ""


def _output(data: Mapping[str, Any]) -> str:
    if data["multi_label"]:
        return "The model outputs one probability per class;\na class is predicted if its probability is above 50%."
    return "The model predicts one of its\nclasses for every image, even if the image shows none of them."


def _training(report: Mapping[str, Any]) -> str:
    data, versions = report["data"], report["environment"]["versions"]
    validation = format_count(data["images"]["validation"], "validation image")
    kept = "the best epoch was kept" if report.get("keep", "best") == "best" else "the last step was kept"
    reason = _escape_sentence(data["reasons"].get("validation", ""))
    return f"""Trained on {format_count(data["images"]["train"], "image")} for {format_count(report["steps"], "step")} \
({format_clock(report["train_seconds"])}). Evaluated after each epoch on
{validation}{f" ({reason})" if reason else ""}; {kept}.
Versions: {", ".join(f"{name} {version}" for name, version in versions.items())}. Reproduce with:

    {printable(report["command"])}"""
