"""The report of a run: complete in itself, and safe with any name in it."""

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

import vitral
from tests.report.example_run import HOSTILE_NAMES, example_report, finished_run, masked_patches_report
from vitral.report.page import MAX_CLASS_ROWS, render_page
from vitral.runs import Run

OLD_RUN = Path(__file__).parent.parent / "fixtures" / "run-0.1"


class Page(HTMLParser):
    """The tags, links and text of an HTML page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def written_page(folder: Path) -> Page:
    return Page(vitral.write_report(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "classes", [HOSTILE_NAMES, tuple(f"class {n}" for n in range(40)), tuple(map(str, range(120)))]
)
@pytest.mark.parametrize("multi_label", [False, True])
def test_page_accepts_any_names_and_any_number_of_classes(
    tmp_path: Path, classes: tuple[str, ...], multi_label: bool
) -> None:
    report = example_report(tuple(name.encode(errors="replace").decode() for name in classes), multi_label=multi_label)
    run = finished_run(tmp_path / "run", report)
    path = vitral.write_report(run.folder)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "u", "i", "why", "note", "d", "v", "r", "x"} & set(page.tags)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)  # nothing from elsewhere
    assert page.tags.count("svg") == (1 if multi_label else 3 if len(classes) <= 100 else 2)
    assert not set(html) & {"\x1b", "\r", "\u202e"}
    assert vitral.write_report(run.folder).read_text(encoding="utf-8") == html  # the same input, the same page


def test_names_that_are_not_utf8_do_not_prevent_a_report(tmp_path: Path) -> None:
    report = example_report(HOSTILE_NAMES)
    run = finished_run(tmp_path / "run", example_report(("a", "b")))
    run.results.write_text(json.dumps(report))  # with \udc80 as an escape
    assert "\N{REPLACEMENT CHARACTER}" in written_page(run.folder).text


def test_page_states_accuracy_with_its_interval_and_the_facts_of_the_run(tmp_path: Path) -> None:
    report = example_report(("cat", "dog"))
    report["test"] |= dict(top1=0.981, top1_low=0.9705, top1_high=0.9877, images=1000)
    text = written_page(finished_run(tmp_path / "run", report).folder).text
    for fact in (
        "98.1%",
        "Accuracy 98.10% (1,000 images, 95% CI 97.0 to 98.8)",
        "123 thousand parameters",
        "The model is from the candidate",
        "probe (class token, discriminant)",
        "1 unreadable image skipped",
        "training images are augmented",
    ):
        assert fact in text


def test_many_classes_are_cut_off(tmp_path: Path) -> None:
    classes = tuple(f"class {n}" for n in range(MAX_CLASS_ROWS + 3))
    text = written_page(finished_run(tmp_path / "run", example_report(classes)).folder).text
    assert f"class {MAX_CLASS_ROWS - 1}" in text
    assert "3 more classes in report.json" in text


def test_missing_overlays_are_counted_and_many_images_are_folded(tmp_path: Path) -> None:
    report = example_report(tuple("abc"))
    report["test"]["typical"] = [dict(key="a.png", label="a", prediction="a", probability=0.5)] * 30
    run = finished_run(tmp_path / "run", report)
    run.plots.mkdir(exist_ok=True)
    for number in (1, 2):
        Image.new("RGB", (8, 8)).save(run.plots / f"relevance-typical-{number:02d}.png")
    text = render_page(run, report)
    assert "drawn for 2 of 30 images" in text
    assert "<summary>6 more</summary>" in text


@pytest.mark.parametrize(("target", "headline"), [("pixels", "0.250"), ("mean-color", "75.0%")])
def test_page_of_a_run_without_labels(tmp_path: Path, target: str, headline: str) -> None:
    page = written_page(finished_run(tmp_path / "run", masked_patches_report(target)).folder)
    assert headline in page.texts
    assert "Labels were not used." in page.text


def test_report_of_version_0_1_is_readable(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "old")
    text = written_page(tmp_path / "old").text
    assert "Accuracy 16.20% (1,000 images, 95% CI 14.0 to 18.6)" in text
    assert "3,608" in text
    assert "Lowest recall: 3 (0%)" in Run(tmp_path / "old").card.read_text()


def test_an_unfinished_run_has_no_report(tmp_path: Path) -> None:
    Run(tmp_path).config.write_text("")
    with pytest.raises(vitral.ConfigError, match="not finished") as caught:
        vitral.write_report(tmp_path)
    assert f"vitral train --resume {tmp_path}" in str(caught.value)


def test_report_needs_no_torch(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "old")
    program = "import sys, vitral; vitral.write_report(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", program, tmp_path / "old"], check=True)


def test_suspects_are_shown_with_their_thumbnails(tmp_path: Path) -> None:
    report = example_report(("cat", "dog"))
    plain = written_page(finished_run(tmp_path / "plain", report).folder)
    assert "Likely label errors" not in plain.text
    assert "Near-duplicates" not in plain.text
    error = dict(
        key="<b>7.png", label="cat", suggested="dog", probability=0.93, thumbnail="../plots/label-error-01.png"
    )
    report["label_errors"] = [error] + [error | dict(key=f"{n}.png", thumbnail=None) for n in range(60)]
    pair = dict(key="a.png", other="b.png", similarity=0.912, split="train", other_split="test")
    report["near_duplicates"] = [pair, pair | dict(other_split="train")]
    run = finished_run(tmp_path / "run", report)
    Image.new("RGB", (8, 8)).save(run.plots / "label-error-01.png")
    page = written_page(run.folder)
    assert "<b>7.png" in page.text
    assert "dog  93% label: cat" in page.text
    assert "13 more images in report.json." in page.text
    assert "2 pairs of nearly equal images, 1 of them in different splits." in page.text
    assert page.tags.count("img") == plain.tags.count("img") + 1
