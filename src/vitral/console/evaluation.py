"""An evaluation on the console."""

from typing import Any

from vitral.console.output import human_console
from vitral.files import printable

MOST_CLASSES, MOST_LISTED = 20, 5


def show_evaluation(told: dict[str, Any]) -> None:
    console = human_console()

    def line(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    first, *rest = summary(told)
    line(first, "bold")
    for text in rest:
        line(text)
    if told.get("per_class"):
        shown, others = worst_classes(told["per_class"])
        console.print(class_table(shown))
        if others:
            line(f"... and {others} more classes, better than these", "dim")
    for truth, answer, times in told.get("confused", [])[:MOST_LISTED]:
        line(f"{'once' if times == 1 else f'{times} times'} {truth} was taken for {answer}", "dim")
    for key, reason in told["unreadable"][:MOST_LISTED]:
        line(f"not counted: {key} ({reason})", "yellow")
    if (bad := len(told["unreadable"])) > MOST_LISTED:
        line(f"... and {bad - MOST_LISTED} more pictures that cannot be read", "yellow")


def summary(told: dict[str, Any]) -> list[str]:
    """The numbers that count, a sentence each; the first is the result."""
    lines = []
    images = f"{told['images']:,} pictures" + (f" ({told['split']})" if told.get("split") else "")
    interval = f"95 % interval {told['top1_low']:.2%} to {told['top1_high']:.2%}"
    if found := told.get("knn"):
        lines.append(f"{found['k']} nearest neighbours: {found['top1']:.2%} right of {images}, {interval}")
    for found in (told.get("few_shot") or {}).get("each") or filter(None, [told.get("few_shot")]):
        seeds = ", ".join(f"{one:.2%}" for one in found["seeds"])
        lines.append(
            f"{found['shots']} a class, closed form: {found['top1']:.2%} right of {images} "
            f"(spread {found['spread']:.2%}; seeds: {seeds})"
        )
    if "loss" in told:
        lines.append(f"{told['top1']:.2%} right of {images}, {interval}")
        top5 = f"top 5: {told['top5']:.2%}, " if len(told.get("per_class") or range(6)) > 5 else ""
        lines.append(f"{top5}loss {told['loss']:.4f}")
    if (found := told.get("mean_average_precision")) is not None:
        lines.append(f"mean average precision: {found:.2%}")
    if found := told.get("real"):
        lines.append(f"with all true labels (ReaL): {found['top1']:.2%} right of {found['images']:,}")
    if found := told.get("calibration"):
        lines.append(f"calibration error: {found['error']:.2%}")
    if found := told.get("scaled"):
        lines.append(f"... after temperature scaling by {found['temperature']:.3f}: {found['error']:.2%}")
    if found := told.get("against"):
        clear = "a clear difference" if found["is_clear"] else "no clear difference"
        lines.append(
            f"{found['model']} is right of {found['top1']:.2%}: {100 * found['difference']:+.2f} points to the model "
            f"above ({100 * found['low']:+.2f} to {100 * found['high']:+.2f}), {clear}; they disagree on "
            f"{found['disagreements']:,} pictures"
        )
    lines += told.get("notes", [])
    if found := told.get("images_per_second"):
        lines.append(f"{found:,.0f} images/s, loading included")
    return lines


def worst_classes(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """All classes, or of many the worst of those that were there, and how many others were there."""
    if len(rows) <= MOST_CLASSES:
        return rows, 0
    there = sorted((row for row in rows if row["images"]), key=lambda row: row["f1"] or 0)
    return there[:MOST_CLASSES], max(0, len(there) - MOST_CLASSES)


def class_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("class", no_wrap=True)
    names = score_names(rows)
    for name in (*names, "images"):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(Text(printable(row["class"])), *(_percent(row.get(name)) for name in names), f"{row['images']:,}")
    return table


def score_names(rows: list[dict[str, Any]]) -> list[str]:
    """Which scores of a class there are."""
    is_multi_label = any(row.get("average_precision") is not None for row in rows)
    return ["precision", "recall", "f1", *(["average_precision"] if is_multi_label else [])]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
