"""Write the report of a run: one HTML page that opens offline, and a model card.

Both are rendered from the files of the run folder, so you can write them again at any time.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, VitralError
from vitral.files import printable, write_text
from vitral.report.card import render_card
from vitral.report.plots import draw_confusion, draw_curves, draw_reliability
from vitral.report.text import (
    CANDIDATE_COLUMNS,
    COUNT_WORDS,
    candidate_row,
    class_table,
    format_clock,
    format_count,
    format_percent,
    format_units,
    masked_patches_lines,
    summary_lines,
)
from vitral.runs import Run, quote

MAX_CLASS_ROWS, MAX_LABEL_ERRORS, MAX_NEAR_DUPLICATES = 200, 48, 50
MAX_OPEN_IMAGES = 24
"""More images of a gallery are folded away."""

Report = Mapping[str, Any]
"""The content of report.json."""


def write_report(folder: str | Path) -> Path:
    """Write report.html and card.md of a finished run and return the path of the page."""
    run = Run.open(Path(folder))
    report = run.read_report()
    if not report:
        resume = f"vitral train --resume {quote(str(folder))}"
        raise ConfigError(f"{folder} is not finished: it has no report.json.", hint=f"Resume it: {resume}")
    write_text(run.report, render_page(run, report), VitralError)
    write_text(run.card, render_card(run.folder.name, report), VitralError)
    return run.report


def render_page(run: Run, report: Report) -> str:
    """Return the HTML page of a run."""
    scores, data = report["test"], report["data"]
    is_pretraining = report.get("objective") == "masked-patches"
    headline = f"{scores['loss']:.3f}" if scores.get("target") == "pixels" else format_percent(scores["top1"])
    lines = masked_patches_lines(scores) if is_pretraining else summary_lines(scores)
    choices = [(choice["name"], choice["value"], choice["reason"]) for choice in report["choices"]]
    environment, command = dict(report["environment"]), _text(report["command"])
    environment = environment.pop("versions") | environment
    sections = [
        _section("Training", draw_curves(run.read_rows(run.losses), run.read_rows(run.metrics)), _training(report)),
        _section("What was tried", _candidates(report.get("candidates") or ())),
        *([_masked_patches(run)] if is_pretraining else _classification(run, scores)),
        _section("Likely label errors", _label_errors(run, report.get("label_errors") or ())),
        _section("Near-duplicates", _near_duplicates(report.get("near_duplicates") or ())),
        _section("Dataset", _dataset(data), _image(run.plots / "data.png", "Training images of each class")),
        _section("Automatic choices", _table(("setting", "value", "reason"), choices)),
        _section("Environment", _table(("name", "value"), environment.items())),
        _section(
            "Reproduce", _paragraphs(["Run the same training on the same data:"]), f"<pre tabindex='0'>{command}</pre>"
        ),
    ]
    name = data["name"] if data["name"] == run.folder.name else f"{data['name']}: {run.folder.name}"
    return _PAGE.format(
        title=_text(f"{data['name']}: {headline}"),
        style=_STYLE,
        headline=headline,
        lines=_paragraphs(lines),
        name=_text(name),
        size=_text(f"{format_units(report['parameters'], COUNT_WORDS)} parameters"),
        sections="".join(sections),
    )


# ---- sections ----


def _training(report: Report) -> str:
    steps = f"{format_count(report['steps'], 'step')} in {format_clock(report['train_seconds'])}."
    origin = "the last step"
    chosen = [candidate["name"] for candidate in report.get("candidates") or () if candidate["chosen"]]
    if chosen and report["best_step"]:
        origin = f"the candidate {chosen[0]} below"
    elif report.get("candidates") and not report["best_step"]:
        origin = "the linear probe, which no training step improved" if report["steps"] else "the linear probe"
    elif report.get("keep", "best") == "best":
        origin = f"step {report['best_step']:,}, the end of the epoch with the best validation score"
    refit = f", refitted to all images in {report['refit_steps']:,} steps" if report.get("refit_steps") else ""
    lines = [f"{steps} The model is from {origin}{refit}."]
    if report.get("augmented"):
        reason = "training images are augmented or mixed, or their labels are smoothed"
        lines.append(f"The training loss can be above the validation loss: {reason}.")
    if report["bad_images"]:
        lines.append(f"{format_count(report['bad_images'], 'unreadable image')} skipped, listed in skipped.txt.")
    return _paragraphs(lines)


def _candidates(candidates: Sequence[Report]) -> str:
    """Return a table of the candidates, with the reason for the choice, or "" without any."""
    if not candidates:
        return ""
    reason = "A candidate replaces the linear probe only if it does better on images that neither was trained on."
    return _paragraphs([reason]) + _table(CANDIDATE_COLUMNS, map(candidate_row, candidates), numbers=3)


def _classification(run: Run, scores: Report) -> list[str]:
    return [
        _section("Confused classes", _confusion(scores)),
        _section("Scores per class", _class_rows(scores["per_class"])),
        _section("Calibration", _calibration(scores)),
        _section("Mistakes with the highest confidence", _with_relevance(run, "mistake", scores["mistakes"])),
        _section("A typical image per class", _with_relevance(run, "typical", scores.get("typical") or ())),
    ]


def _masked_patches(run: Run) -> str:
    text = (
        "Test images, from left to right: the original, the model's input (masked patches are hatched, a few are "
        "replaced by other patches), the prediction and the target. Patches without a prediction are pale."
    )
    return _section("Masked patches", _paragraphs([text]), _image(run.plots / "masked.png", "Masked and predicted"))


def _confusion(scores: Report) -> str:
    names = [row["class"] for row in scores["per_class"]]
    plot = draw_confusion(scores["confusion"], names) if scores.get("confusion") else ""
    pairs = scores.get("confused") or []
    return _side_by_side(plot, _table(("label", "prediction", "images"), pairs, numbers=1) if pairs else "")


def _class_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    titles, cells = class_table(rows)
    table = _table(titles, cells[:MAX_CLASS_ROWS], numbers=len(titles) - 1)
    return table + _remainder(rows, MAX_CLASS_ROWS, "classes")


def _calibration(scores: Report) -> str:
    if not (calibration := scores.get("calibration")):
        return ""
    text = (
        "In a calibrated model, 90% of the predictions with 90% confidence are correct. Here, confidence and accuracy "
        f"differ by {format_percent(calibration['error'])} on average (expected calibration error, "
        f"{len(calibration['bins'])} bins)."
    )
    return _side_by_side(draw_reliability(calibration["bins"]), _paragraphs([text]))


def _with_relevance(run: Run, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return images beside the relevance of their predictions, as far as it was drawn."""
    files = [f"{name}-{number:02d}.png" for number in range(1, len(rows) + 1)]
    drawn = sum((run.plots / f"relevance-{file}").is_file() for file in files)
    text = "The colors show which patches speak for the prediction, bright for the most (vitral inspect shows more)."
    if 0 < drawn < len(files):
        text += f" They are drawn for {drawn} of {len(files)} images, so that the report is not late."
    figures = list(zip(files, (row["prediction"] for row in rows), rows, strict=True))
    first, rest = figures[:MAX_OPEN_IMAGES], figures[MAX_OPEN_IMAGES:]
    folded = f"<details><summary>{len(rest)} more</summary>{_gallery(run, rest)}</details>" if rest else ""
    return (_paragraphs([text]) if drawn else "") + _gallery(run, first) + folded


def _label_errors(run: Run, errors: Sequence[Mapping[str, Any]]) -> str:
    if not errors:
        return ""
    text = (
        "These labels look wrong: a linear probe that was not fitted to the image finds another class more probable. "
        "The suggested class is in bold, with its probability."
    )
    shown = errors[:MAX_LABEL_ERRORS]
    rows = ((error.get("thumbnail") or "", error["suggested"], error) for error in shown)
    return _paragraphs([text]) + _gallery(run, rows) + _remainder(errors, MAX_LABEL_ERRORS, "images")


def _near_duplicates(pairs: Sequence[Mapping[str, Any]]) -> str:
    if not pairs:
        return ""
    across = sum(pair["split"] != pair["other_split"] for pair in pairs)
    text = f"{format_count(len(pairs), 'pair')} of nearly equal images, {across:,} of them in different splits."
    cells = [
        (pair["key"], pair["split"], pair["other"], pair["other_split"], f"{pair['similarity']:.3f}")
        for pair in pairs[:MAX_NEAR_DUPLICATES]
    ]
    table = _table(("image", "split", "other image", "split", "similarity"), cells, numbers=1)
    return _paragraphs([text]) + table + _remainder(pairs, MAX_NEAR_DUPLICATES, "pairs")


def _remainder(rows: Sequence[object], shown: int, noun: str) -> str:
    return _paragraphs([f"{len(rows) - shown:,} more {noun} in report.json."]) if len(rows) > shown else ""


def _dataset(data: Report) -> str:
    rows = [(split, f"{count:,}", data["reasons"].get(split, "")) for split, count in data["images"].items()]
    counts = data["per_class"]["train"]
    summary = "Labels were not used."
    if counts:
        summary = f"{len(data['classes'])} classes with {min(counts):,} to {max(counts):,} training images each."
    return _paragraphs([summary]) + _table(("split", "images", "source"), rows) + _paragraphs(data["notes"])


# ---- HTML ----


def _text(value: object) -> str:
    """Return a value as HTML text without control characters: names may contain anything."""
    return escape(printable(str(value)))


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _section(title: str, *contents: str) -> str:
    """Return a titled section, or "" without content."""
    content = "".join(contents)
    return f"<section><h2>{_text(title)}</h2>{content}</section>" if content else ""


def _side_by_side(*contents: str) -> str:
    columns = "".join(f"<div>{content}</div>" for content in contents if content)
    return f"<div class='side'>{columns}</div>" if columns else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> str:
    """Return a table whose last `numbers` columns are right-aligned."""

    def row_of(cells: Sequence[object], tag: str) -> str:
        first_number = len(cells) - numbers
        classes = ["" if index < first_number else " class='number'" for index in range(len(cells))]
        return "".join(f"<{tag}{style}>{_text(cell)}</{tag}>" for cell, style in zip(cells, classes, strict=True))

    body = "".join(f"<tr>{row_of(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{row_of(titles, 'th')}</tr></thead>"
    return f"<div class='scroll' tabindex='0'><table>{head}<tbody>{body}</tbody></table></div>"


def _gallery(run: Run, rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return thumbnails with captions, and with their relevance if the plots folder has it.

    A row is a file of the plots folder, a class, and the facts of the image."""
    figures = []
    for file, predicted, facts in rows:
        image = _image(run.plots / Path(file).name, facts["key"])
        overlay = _image(run.plots / f"relevance-{Path(file).name}", f"Relevance for {predicted}")
        prediction = f"<b>{_text(predicted)}</b> {format_percent(facts['probability'], 0)}"
        caption = f"{prediction}<br>label: {_text(facts['label'])}<br><small>{_text(facts['key'])}</small>"
        figures.append(f"<figure>{image}{overlay}<figcaption>{caption}</figcaption></figure>")
    return f"<div class='images'>{''.join(figures)}</div>" if figures else ""


def _image(path: Path, description: str) -> str:
    """Return an embedded PNG, or "" if the file does not exist."""
    if not path.is_file():
        return ""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{_text(description)}" src="data:image/png;base64,{content}">'


_STYLE = """
:root { color-scheme: light dark; --ink: #2d3748; --quiet: #5a6880; --page: #f7fafc; --card: #fff; --line: #e2e8f0;
  --shade: #edf2f7; --blue: #2b6cb0; --orange: #c05621; --gray: #8d99ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e8f0; --quiet: #9aa8bd; --page: #12161d; --card: #1b212b;
  --line: #303947; --shade: #262e3a; --blue: #63a4e0; --orange: #f0995f; --gray: #77849a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 24px 20px 60px; }
header { display: flex; gap: 8px 28px; align-items: center; flex-wrap: wrap; padding: 8px 0 18px; }
header .headline { font-size: 56px; font-weight: 700; color: var(--blue); line-height: 1; }
header p { margin: 2px 0; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 20px;
  margin: 14px 0; }
svg, img { max-width: 100%; height: auto; } section > img { display: block; margin-top: 12px; border-radius: 6px; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 6px; overflow-wrap: anywhere; }
th:not(.number), td:not(.number) { min-width: 6em; }  /* on a phone, scroll instead of breaking words */
th { border-bottom: 1px solid var(--gray); white-space: nowrap; } tbody tr:nth-child(even) { background: var(--shade); }
.number { text-align: right; white-space: nowrap; }
.side { display: flex; flex-wrap: wrap; gap: 28px; align-items: flex-start; }
.side > div { flex: 0 1 auto; max-width: 100%; }
.side > div:last-child { flex: 1 1 260px; }
.scroll { overflow-x: auto; }
pre { background: var(--shade); padding: 10px; border-radius: 6px; overflow-x: auto; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 14px; }
.images:has(img + img) { grid-template-columns: repeat(auto-fill, minmax(212px, 1fr)); }
figure { margin: 0; } figure img { width: 96px; } figure img + img { margin-left: 8px; }
figcaption { font-size: 12px; overflow-wrap: anywhere; }
small { color: var(--quiet); }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--blue); margin-bottom: 12px; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body><main><header><div class="headline">{headline}</div><div><h1>{name}</h1><small>{size}</small></div>
<div>{lines}</div></header>
{sections}</main></body></html>
"""
