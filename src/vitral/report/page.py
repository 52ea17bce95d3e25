"""The report of a run: one page that opens offline, and a card for whoever gets the model. Both are drawn from the
files of the run, so they can be made again at any time."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vitral.console.evaluation import score_names, summary
from vitral.console.output import in_units
from vitral.console.training import as_clock
from vitral.errors import ConfigError
from vitral.report.plots import draw_confusion, draw_curves, draw_reliability
from vitral.runs import Run

MOST_ROWS = 200


def write_report(folder: str | Path) -> Path:
    """Draws report.html and card.md from a finished run; gives the path of the page."""
    run = Run.open(Path(folder))
    told = run.read_json(run.report)
    if not told:
        raise ConfigError(f"{folder} is not finished.", hint=f"Go on with it: vitral train --resume {folder}")
    run.page.write_text(page(run, told), encoding="utf-8")
    run.card.write_text(card(run, told), encoding="utf-8")
    return run.page


def page(run: Run, told: dict[str, Any]) -> str:
    held, data = told["test"], told["data"]
    is_filled_in = told.get("objective") == "masked-patches"
    lines = filled_in_summary(held) if is_filled_in else summary(held)
    results = [_section("What was hidden", *_filled_in(run))] if is_filled_in else _results(run, held)
    sections = [
        _section("Training", draw_curves(run.read_rows(run.losses), run.read_rows(run.metrics)), _training(told)),
        *results,
        _section("Data", _data(data), _picture(run.plots / "data.png", "some training pictures of each class")),
        _section("What was decided, and why", _table(("setting", "value", "reason"), _decisions(told))),
        _section("Environment", _table(("what", "value"), _environment(told["environment"]))),
        _section("Once more", "<p>The same run, on the same data:</p>", f"<pre>{escape(told['command'])}</pre>"),
    ]
    headline = f"{held['top1']:.1%}" if held.get("target") != "pixels" else f"{held['loss']:.3f}"
    title = f"{data['name']}: {headline}"
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        headline=headline,
        lines="".join(f"<p>{escape(line)}</p>" for line in lines),
        name=escape(data["name"] if data["name"] == run.folder.name else f"{data['name']}: {run.folder.name}"),
        size=escape(f"{in_units(told['parameters'], ('', 'thousand', 'million', 'billion'))} parameters"),
        sections="".join(sections),
    )


def _results(run: Run, held: dict[str, Any]) -> list[str]:
    return [
        _section("Which classes are mistaken", *_confusion(held)),
        _section("Each class", _class_rows(held["per_class"])),
        _section("How far to trust a probability", *_calibration(held)),
        _section("The worst mistakes", _mistakes(run, held["mistakes"])),
    ]


def filled_in_summary(held: dict[str, Any]) -> list[str]:
    """Of a run without labels."""
    asked = f"on {held['images']:,} held-out pictures, target {held['target']}"
    if held["target"] == "pixels":
        return [f"mean squared error of hidden pixels {held['loss']:.4f}, {asked}"]
    return [
        f"{held['top1']:.1%} of the hidden colours found {asked}",
        f"{held['commonest']:.1%} would be found by always saying the commonest",
        f"loss {held['loss']:.4f}",
    ]


def _filled_in(run: Run) -> list[str]:
    text = (
        "<p>Held-out pictures, from left to right: as they are; what the network saw (slanted lines: hidden; a few "
        "are from another place); what it says was there; what was there. Patches that it was not asked for are "
        "pale.</p>"
    )
    return [text, _picture(run.plots / "masked.png", "hidden and filled in")]


def _section(title: str, *parts: str) -> str:
    inside = "".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def _side_by_side(*parts: str) -> str:
    inside = "".join(f"<div>{part}</div>" for part in parts if part)
    return f"<div class='side'>{inside}</div>" if inside else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = False) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    kind = ' class="numbers"' if numbers else ""
    return f"<div class='scroll'><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _training(told: dict[str, Any]) -> str:
    parameters = in_units(told["parameters"], ("", "thousand", "million", "billion"))
    lines = [
        f"{told['steps']:,} steps in {as_clock(told['train_seconds'])}; {parameters} parameters. "
        + (
            f"The best epoch, by the validation, ended at step {told['best_step']:,}."
            if told.get("keep", "best") == "best"
            else "The model is that of the last step."
        )
    ]
    if told.get("changes_pictures"):
        lines.append(
            "Training pictures are changed at random or mixed, or their labels smoothed: their loss can lie above the "
            "validation's."
        )
    if found := told.get("baseline"):
        lines.append(
            f"Before training, the features of the starting weights gave {found['knn']:.1%} by nearest neighbours and "
            f"{found['few_shot']:.1%} by ten pictures a class (on {found['pictures']} pictures of the validation)."
        )
    if told["bad_pictures"]:
        lines.append(f"Pictures that could not be read: {told['bad_pictures']:,}. They are listed in skipped.txt.")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _confusion(held: dict[str, Any]) -> list[str]:
    names = [row["class"] for row in held["per_class"]]
    plot = draw_confusion(held["confusion"], names) if held.get("confusion") else ""
    pairs = held.get("confused", [])
    return [_side_by_side(plot, _table(("truth", "answer", "times"), pairs) if pairs else "")]


def _class_rows(rows: list[dict[str, Any]]) -> str:
    names = score_names(rows)
    cells = (
        [row["class"], *("-" if row.get(name) is None else f"{row[name]:.1%}" for name in names), f"{row['images']:,}"]
        for row in rows[:MOST_ROWS]
    )
    more = f"<p>... and {len(rows) - MOST_ROWS} more, in report.json.</p>" if len(rows) > MOST_ROWS else ""
    return _table(("class", *(name.replace("_", " ") for name in names), "pictures"), cells, numbers=True) + more


def _calibration(held: dict[str, Any]) -> list[str]:
    if not (found := held.get("calibration")):
        return []
    text = (
        f"<p>Of the answers given with 90 % confidence, 90 % should be right. Here confidence is off by "
        f"{found['error']:.1%} on average (expected calibration error, 15 bins).</p>"
    )
    return [_side_by_side(draw_reliability(found["bins"]), text)]


def _mistakes(run: Run, mistakes: list[dict[str, Any]]) -> str:
    if not mistakes:
        return ""
    figures = []
    for number, mistake in enumerate(mistakes, 1):
        picture = _picture(run.plots / f"mistake-{number:02d}.png", mistake["key"])
        text = f"<b>{escape(mistake['answer'])}</b> {mistake['probability']:.0%}, is {escape(mistake['truth'])}"
        key = escape(mistake["key"])
        figures.append(f"<figure>{picture}<figcaption>{text}<br><small>{key}</small></figcaption></figure>")
    return f"<div class='pictures'>{''.join(figures)}</div>"


def _picture(path: Path, text: str) -> str:
    if not path.is_file():
        return ""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{content}">'


def _data(data: dict[str, Any]) -> str:
    rows = [
        (name.replace("_", " "), f"{number:,}", data["reasons"].get(name, ""))
        for name, number in data["pictures"].items()
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in data["notes"])
    counts = data["per_class"]["train"]
    spread = "No labels were used."
    if counts:
        spread = f"{len(data['classes'])} classes with {min(counts):,} to {max(counts):,} training pictures each."
    return f"<p>{spread}</p>" + _table(("split", "pictures", "why"), rows) + notes


def _decisions(told: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(one["name"], one["value"], one["reason"]) for one in told["decisions"]]


def _environment(told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, str(value)) for name, value in told["versions"].items()]
    return rows + [(name, str(value)) for name, value in told.items() if name != "versions"]


def card(run: Run, told: dict[str, Any]) -> str:
    """A model card in Markdown: what it is, what it is good for, how it was made."""
    held, data = told["test"], told["data"]
    if told.get("objective") == "masked-patches":
        return _CARD_WITHOUT_LABELS.format(
            name=run.folder.name,
            data=data["name"],
            results="\n".join(f"- {line}" for line in filled_in_summary(held)),
            parameters=f"{told['parameters']:,}",
            train=f"{data['pictures']['train']:,}",
            steps=f"{told['steps']:,}",
            time=as_clock(told["train_seconds"]),
            command=told["command"],
        )
    missed = [row for row in held["per_class"] if row["images"] and (row["recall"] or 0) < 1]
    worst = sorted(missed, key=lambda row: row["recall"] or 0)[:3]
    weak = ", ".join(f"{row['class']} ({row['recall']:.0%} found)" for row in worst)
    classes = ", ".join(data["classes"][:30]) + (", ..." if len(data["classes"]) > 30 else "")
    pictures = data["pictures"]
    return _CARD.format(
        name=run.folder.name,
        data=data["name"],
        classes=classes,
        results="\n".join(f"- {line}" for line in summary(held)),
        weak=f"Weakest: {weak}. " if weak else "",
        parameters=f"{told['parameters']:,}",
        train=f"{pictures['train']:,}",
        answers=_answers(several=data["multi_label"]),
        validation=_selection(told),
        steps=f"{told['steps']:,}",
        time=as_clock(told["train_seconds"]),
        command=told["command"],
        versions=", ".join(f"{name} {version}" for name, version in told["environment"]["versions"].items()),
    )


def _answers(*, several: bool) -> str:
    if several:
        return "It answers every class\nwith a probability of its own; above one half is a yes."
    return "It answers one of its classes for any\npicture, also for one that shows none of them."


def _selection(told: dict[str, Any]) -> str:
    """How the epoch was chosen."""
    data = told["data"]
    pictures, why = data["pictures"]["validation"], data["reasons"]["validation"]
    chose = "chose the best epoch" if told.get("keep", "best") == "best" else "watched it, and the last step was kept"
    return f"{pictures:,} pictures ({why}) {chose}"


_CARD = """# {name}

A network of {parameters} parameters that tells {data} apart: {classes}.

## Results

{results}

{weak}These numbers hold for pictures like those it was measured on. {answers}

## How it was made

Trained on {train} pictures; {validation}. {steps} steps in {time} ({versions}):

    {command}

## How to use it

    vitral predict model.safetensors picture.jpg

The file holds the weights, the names of the classes and the preprocessing.
"""

_CARD_WITHOUT_LABELS = """# {name}

A Vision Transformer of {parameters} parameters that learnt from {data} without labels, by filling in patches that were
hidden. It has no head: it gives features, and is there to be fine-tuned.

## Results

{results}

## How it was made

Trained on {train} pictures, {steps} steps in {time}:

    {command}

## How to use it

    vitral train PHOTOS --from model.safetensors
    vitral features model.safetensors PICTURES --out features.npz
    vitral evaluate model.safetensors PHOTOS --knn 10
"""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #2d3748; background: #f7fafc; margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 24px 20px 60px; }
header { display: flex; gap: 28px; align-items: center; flex-wrap: wrap; padding: 8px 0 18px; }
header .big { font-size: 56px; font-weight: 700; color: #2b6cb0; line-height: 1; }
header p { margin: 2px 0; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 0 0 10px; }
section { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: 16px 20px; margin: 14px 0; }
svg, img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { text-align: left; padding: 3px 14px 3px 0; }
th { border-bottom: 1px solid #cbd5e0; } tbody tr:nth-child(even) { background: #f7fafc; }
table.numbers td:not(:first-child), table.numbers th:not(:first-child) { text-align: right; }
.side { display: flex; flex-wrap: wrap; gap: 28px; align-items: flex-start; }
.side > div { flex: 0 1 auto; max-width: 100%; }
.side > div:last-child { flex: 1 1 260px; }
.scroll { overflow-x: auto; } pre { background: #edf2f7; padding: 10px; border-radius: 6px; overflow-x: auto; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 14px; }
figure { margin: 0; } figure img { width: 96px; } figcaption { font-size: 12px; overflow-wrap: anywhere; }
small { color: #718096; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main><header><div class="big">{headline}</div><div><h1>{name}</h1><small>{size}</small></div>
<div>{lines}</div></header>
{sections}</main></body></html>
"""
