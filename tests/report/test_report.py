"""The page of a run: drawn from its files, whatever names they hold, and complete in itself."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitral
from vitral.data.dataset import FileSource, Item
from vitral.evaluation.results import summarize
from vitral.inference.pipeline import ModelOutputs
from vitral.runs import Run

NASTY = ("<script>alert(1)</script>", "$x$ & [b]", "犬と猫", "a" * 60, 'quote"s')


def finished_run(folder: Path, classes: tuple[str, ...], *, multi_label: bool = False) -> Run:
    """A run whose model answers at random."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(200, len(classes), generator=random)
    labels = torch.randint(0, len(classes), (200,), generator=random)
    if multi_label:
        labels = torch.nn.functional.one_hot(labels, len(classes)).float()
    items = [Item(f"<img src=x>{number}.png", 0, FileSource("x.png")) for number in range(200)]
    bad = (("<b>.png", "<i>"),)
    answers = ModelOutputs(items=items, rows=logits, labels=labels, order=torch.arange(200), unreadable=bad)
    found = summarize(answers, classes)
    run = Run(folder)
    run.plots.mkdir(parents=True)
    run.config.write_text('data = "x"\n')
    Image.new("RGB", (8, 8)).save(run.plots / "data.png")
    Image.new("RGB", (8, 8)).save(run.plots / "mistake-01.png")
    for step in range(10, 60, 10):
        run.add_row(run.losses, {"step": step, "loss": 60 / step, "lr": 0.1})
    run.add_row(run.metrics, dict(epoch=0, step=50, train_loss=1.0, loss=1.1, top1=0.5, top5=0.9))
    counts = [10] * len(classes)
    told: dict[str, Any] = dict(
        test=found.as_dict(),
        best_step=50,
        steps=50,
        train_seconds=3.2,
        bad_pictures=1,
        parameters=123_456,
        baseline=dict(few_shot=0.5, knn=0.6, train_pictures=10, pictures=20),
        data=dict(
            name="<u>data</u>",
            classes=classes,
            multi_label=multi_label,
            pictures=dict(train=10, validation=1, test=200),
            per_class=dict(train=counts),
            reasons=dict(test="<why>", validation="<why>"),
            notes=["<note>"],
        ),
        decisions=[dict(name="<d>", value="<v>", reason="<r>")],
        environment=dict(versions=dict(vitral="1"), device="cpu"),
        command="vitral train '<x>'",
    )
    run.write_json(run.report, told)
    return run


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.mark.parametrize("classes", [NASTY, tuple(f"class {n}" for n in range(40)), tuple(map(str, range(120)))])
@pytest.mark.parametrize("multi_label", [False, True])
def test_any_names_any_number_of_classes(tmp_path: Path, classes: tuple[str, ...], multi_label: bool) -> None:
    run = finished_run(tmp_path / "run", classes, multi_label=multi_label)
    path = vitral.write_report(run.folder)
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert not {"script", "u", "i", "why", "note", "d", "v", "r"} & set(page.tags)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)  # nothing from elsewhere
    assert page.tags.count("svg") == (1 if multi_label else 3 if len(classes) <= 100 else 2)
    assert classes[0] in run.card.read_text(encoding="utf-8")
    assert "NaN" not in json.dumps(json.loads(run.report.read_text()))
    assert vitral.write_report(run.folder).read_text(encoding="utf-8") == text  # drawn again, it is the same


def test_a_run_that_is_not_finished_has_no_report(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.config.write_text("")
    with pytest.raises(vitral.ConfigError, match="not finished"):
        vitral.write_report(tmp_path)
