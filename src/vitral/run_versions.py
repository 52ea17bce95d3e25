"""Translate what runs of older versions wrote: settings, manifest.json and report.json under their current names."""

from typing import Any

OLD_NAMES = {
    "held_out": "test",
    "selection": "validation",
    "decisions": "choices",
    "pictures": "images",
    "train_pictures": "train_images",
    "bad_pictures": "bad_images",
    "changes_pictures": "augmented",
    "commonest": "most_common",
    "truth": "label",
    "answer": "prediction",
    "right": "accuracy",
}
"""Names in manifest.json and report.json of version 0.1, at any depth."""


def upgrade_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return settings under their current names and values."""
    names = {"selection": "val_fraction", "most_bad": "max_bad_fraction"}
    optim, masking = content.get("optim"), content.get("masking")
    if isinstance(optim, dict):
        if optim.get("name") == "adam":
            optim["name"] = "adamw"
        if "selection" in content and optim.get("name") != "sgd":
            optim.pop("momentum", None)  # it had no effect
    if isinstance(masking, dict) and masking.get("target") == "mean-colour":
        masking["target"] = "mean-color"
    return {names.get(name, name): value for name, value in content.items()}


def with_current_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object under their current names."""
    return {OLD_NAMES.get(name, name): value for name, value in fields.items()}
