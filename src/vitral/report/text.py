"""Wording that the page, the model card and the console share: numbers with units, and scores as sentences."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

COUNT_UNITS = ("", "K", "M", "G", "T", "P")
COUNT_WORDS = ("", "thousand", "million", "billion")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS = ((365 * 24 * 3600, "years"), (24 * 3600, "days"), (3600, "hours"), (60, "minutes"))


def format_units(number: float, units: Sequence[str] = COUNT_UNITS, base: float = 1000) -> str:
    """Return a number with about three digits and a unit: 12_345_678 becomes '12.3 M'."""
    step = 0
    while number >= base and step < len(units) - 1:
        number /= base
        step += 1
    digits = 0 if number >= 100 or (step == 0 and number == int(number)) else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {units[step]}".rstrip()


def format_bytes(number: float) -> str:
    """Return a size in bytes with a binary unit, such as '21.4 MiB'."""
    return format_units(number, _BYTE_UNITS, base=1024)


def format_clock(seconds: float) -> str:
    """Return a duration as 3:12 or 1:03:12."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_duration(seconds: float) -> str:
    """Return a duration in its largest unit that is at least two, such as '3.5 days'."""
    for size, unit in _TIME_UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def format_percent(fraction: float | None, digits: int = 1) -> str:
    """Return a fraction as a percentage, or '-' if it is unknown."""
    return "-" if fraction is None or isnan(fraction) else f"{fraction:.{digits}%}"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return '1 image' or '1,000 images'."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_accuracy(scores: Mapping[str, Any], name: str = "Accuracy") -> str:
    """Return top-1 with its confidence interval: 'Accuracy 98.10% (1,000 images, 95% CI 97.1 to 98.8)'."""
    facts = [format_count(scores["images"], "image")] if "images" in scores else []
    if scores.get("top1_low") is not None:
        facts.append(f"95% CI {100 * scores['top1_low']:.1f} to {100 * scores['top1_high']:.1f}")
    return f"{name} {format_percent(scores['top1'], 2)}" + (f" ({', '.join(facts)})" if facts else "")


def summary_lines(scores: Mapping[str, Any]) -> list[str]:
    """Return the scores of `Evaluation.as_dict()`, or of `test` in report.json, as sentences, the main result first."""
    lines = [*_feature_lines(scores), *_classifier_lines(scores), *_calibration_lines(scores)]
    if split := scores.get("split"):
        lines.insert(1, f"Evaluated on: {split}")
    if against := scores.get("against"):
        lines.append(_comparison_line(against))
    lines += scores.get("notes") or []
    if speed := scores.get("images_per_second"):
        lines.append(f"{speed:,.0f} images/s, including loading")
    return lines


CANDIDATE_COLUMNS = ("choice", "candidate", "measured on", "accuracy", "95% interval", "time")


def candidate_row(candidate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a candidate: its mark if it was chosen, its name, its evidence, and its numbers."""
    low, high = candidate["interval"]
    return (
        "chosen" if candidate["chosen"] else "",
        candidate["name"],
        candidate["evidence"],
        format_percent(candidate["top1"]),
        f"{format_percent(low)} to {format_percent(high)}",
        format_clock(candidate["seconds"]),
    )


def masked_patches_lines(scores: Mapping[str, Any]) -> list[str]:
    """Return the test scores of a run that predicts masked patches as one sentence each, the main result first."""
    images = f"{format_count(scores['images'], 'image')}, target {scores['target']}"
    if scores["target"] == "pixels":
        return [f"Mean squared error {scores['loss']:.4f} on masked pixels ({images})"]
    return [
        f"Accuracy {format_percent(scores['top1'], 2)} on masked patches ({images})",
        f"Baseline {format_percent(scores['most_common'], 2)}: always predicting the most common color",
        f"Loss {scores['loss']:.4f}",
    ]


def class_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table of the scores per class."""
    is_multi_label = any(row.get("average_precision") is not None for row in rows)
    scores = ["precision", "recall", "f1", *(["average_precision"] if is_multi_label else [])]
    titles = ["class", *(name.replace("_", " ") for name in scores), "images"]
    return titles, [
        [row["class"], *(format_percent(row.get(name)) for name in scores), f"{row['images']:,}"] for row in rows
    ]


def _classifier_lines(scores: Mapping[str, Any]) -> list[str]:
    if scores.get("loss") is None:  # frozen features have no classifier
        return []
    lines = [format_accuracy(scores)]
    loss = f"loss {scores['loss']:.4f}"
    has_top5 = len(scores.get("per_class") or range(6)) > 5
    lines.append(f"Top-5 accuracy {format_percent(scores['top5'], 2)}, {loss}" if has_top5 else loss.capitalize())
    if (precision := scores.get("mean_average_precision")) is not None:
        lines.append(f"Mean average precision {format_percent(precision, 2)}")
    if real := scores.get("real"):
        lines.append(format_accuracy(real, "Accuracy with ReaL labels"))
    return lines


def _feature_lines(scores: Mapping[str, Any]) -> list[str]:
    """Return the results on frozen features: nearest neighbors and few-shot regression."""
    lines = []
    if knn := scores.get("knn"):
        lines.append(format_accuracy({"images": scores["images"], **knn}, f"{knn['k']}-nearest-neighbor accuracy"))
    few_shot = scores.get("few_shot") or {}
    for result in few_shot.get("each") or ([few_shot] if few_shot else []):
        seeds = ", ".join(format_percent(top1, 2) for top1 in result["seeds"])
        lines.append(
            f"{result['shots']}-shot accuracy {format_percent(result['top1'], 2)} "
            f"(closed form, standard deviation {format_percent(result['spread'], 2)}; seeds: {seeds})"
        )
    return lines


def _calibration_lines(scores: Mapping[str, Any]) -> list[str]:
    lines = []
    if calibration := scores.get("calibration"):
        lines.append(f"Calibration error {format_percent(calibration['error'], 2)}")
    if scaled := scores.get("scaled"):
        error = format_percent(scaled["error"], 2)
        lines.append(f"Calibration error {error} after temperature scaling (temperature {scaled['temperature']:.3f})")
    return lines


def _comparison_line(against: Mapping[str, Any]) -> str:
    difference = "a clear difference" if against["is_clear"] else "no clear difference"
    interval = f"95% CI {100 * against['low']:+.2f} to {100 * against['high']:+.2f}"
    return (
        f"{against['model']}: accuracy {format_percent(against['top1'], 2)}, {100 * against['difference']:+.2f} points "
        f"({interval}), {difference}; the models disagree on {format_count(against['disagreements'], 'image')}"
    )
