"""A finished run folder without training: random predictions, and hostile names wherever a name can be."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vitral.data.dataset import FileSource, Item
from vitral.evaluation.results import summarize
from vitral.inference.pipeline import ModelOutputs
from vitral.runs import Run

HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "$x$ & [b](http://evil.example)",
    "red\x1b[31m\nline\r\u202etwo\udc80",
    "犬と猫",
    "a" * 300,
    'quote"s `code` *b* _i_ |',
)


def example_report(classes: tuple[str, ...], *, multi_label: bool = False) -> dict[str, Any]:
    """Return the content of report.json for random predictions on 200 images."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, len(classes), generator=generator)
    labels = torch.randint(0, len(classes), (200,), generator=generator)
    if multi_label:
        labels = torch.nn.functional.one_hot(labels, len(classes)).float()
    items = [Item(f"<img src=x>\x1b{number}.png", 0, FileSource("x.png")) for number in range(200)]
    unreadable = (("<b>.png", "<i>"),)
    outputs = ModelOutputs(items=items, outputs=logits, labels=labels, indices=torch.arange(200), unreadable=unreadable)
    return dict(
        test=summarize(outputs, classes).as_dict(),
        objective="classify",
        best_step=50,
        keep="best",
        steps=50,
        train_seconds=3.2,
        bad_images=1,
        augmented=True,
        parameters=123_456,
        candidates=[
            dict(
                name="probe (class token, discriminant)",
                top1=0.6,
                interval=[0.5, 0.7],
                loss=1.0,
                evidence="20 validation images",
                seconds=3.0,
                chosen=False,
            ),
            dict(
                name="last-blocks",
                top1=0.7,
                interval=[0.6, 0.8],
                loss=0.9,
                evidence="20 validation images",
                seconds=9.0,
                chosen=True,
            ),
        ],
        data=dict(
            name="<u>data</u>",
            classes=list(classes),
            multi_label=multi_label,
            images=dict(train=10, validation=1, test=200),
            per_class=dict(train=[10] * len(classes)),
            reasons=dict(test="<why>", validation="<why>"),
            notes=["<note>"],
        ),
        choices=[dict(name="<d>", value="<v>", reason="<r>")],
        environment=dict(versions=dict(vitral="1"), device="cpu"),
        command="vitral train '<x>'",
    )


def finished_run(folder: Path, report: dict[str, Any]) -> Run:
    """Write a run folder with this report, two images and short curves."""
    run = Run(folder)
    run.plots.mkdir(parents=True)
    run.config.write_text('data = "x"\n')
    Image.new("RGB", (8, 8)).save(run.plots / "data.png")
    Image.new("RGB", (8, 8)).save(run.plots / "mistake-01.png")
    for step in range(10, 60, 10):
        run.add_row(run.losses, {"step": step, "loss": 60 / step, "lr": 0.1})
    run.add_row(run.metrics, dict(epoch=0, step=50, train_loss=1.0, loss=1.1, top1=0.5, top5=0.9))
    run.write_report(report)
    return run


def masked_patches_report(target: str) -> dict[str, Any]:
    """Return the content of report.json for a run that predicts masked patches."""
    report = example_report(("a", "b"))
    report["objective"] = "masked-patches"
    report["data"] |= dict(classes=[], per_class=dict(train=[]))
    report["test"] = dict(top1=None, top5=None, loss=0.25, images=200, target="pixels")
    if target != "pixels":
        report["test"] |= dict(top1=0.75, target=target, most_common=0.5)
    return report
