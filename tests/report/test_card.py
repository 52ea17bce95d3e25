"""The model card: Markdown that shows any name literally."""

import pytest

from tests.report.example_run import HOSTILE_NAMES, example_report, masked_patches_report
from vitral.report.card import MAX_LISTED_CLASSES, MAX_NAME_LENGTH, escape_markdown, render_card


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("cat", "cat"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("a\nb\r\x1b[31m", "a�b��\\[31m"),
        ("[x](http://evil.example)", "\\[x\\](http\\://evil.example)"),
        ("www.evil.example", "www\\.evil.example"),
        ("*b* _i_ `c` | # ~ \\", "\\*b\\* \\_i\\_ \\`c\\` \\| \\# \\~ \\\\"),
        ("R&D &lt;", "R&amp;D &amp;lt;"),
        ("\u202eevil\udc80", "�evil�"),
        ("犬", "犬"),
    ],
)
def test_names_are_escaped(name: str, escaped: str) -> None:
    assert escape_markdown(name) == escaped


def test_hostile_class_names_cannot_leave_their_sentence() -> None:
    plain = render_card("run", example_report(tuple(f"class {n}" for n in range(len(HOSTILE_NAMES)))))
    card = render_card("<b>run\n# Title", example_report(HOSTILE_NAMES))
    card.encode()  # no lone surrogates
    assert len(card.splitlines()) == len(plain.splitlines())
    for raw in ("<script>", "</script>", "\x1b", "\r", "\u202e", "](http:", "<b>", "\n# Title", "<u>", "<why>"):
        assert raw not in card.replace("'<x>'", ""), raw
    assert "a" * MAX_NAME_LENGTH not in card
    assert "犬と猫" in card


def test_line_breaks_in_the_command_stay_in_the_code_block() -> None:
    report = example_report(("a", "b"))
    report["command"] = "vitral train 'x\n\n# Title'"
    assert "\n# Title" not in render_card("run", report)


def test_card_lists_results_weak_classes_and_provenance() -> None:
    report = example_report(("cat", "dog"))
    report["test"] |= dict(top1=0.981, top1_low=0.9705, top1_high=0.9877, images=1000)
    report["test"]["per_class"][0]["recall"], report["test"]["per_class"][1]["recall"] = 0.5, 1.0
    card = render_card("pets-1", report)
    for fact in (
        "# pets-1\n",
        "2 classes: cat, dog.",
        "- Accuracy 98.10% (1,000 images, 95% CI 97.0 to 98.8)",
        "Lowest recall: cat (50%). ",
        "10 images for 50 steps (0:03)",
        "the best epoch was kept",
        "vitral train '<x>'",
    ):
        assert fact in card


def test_long_lists_of_classes_are_cut_off() -> None:
    card = render_card("run", example_report(tuple(f"class {n}" for n in range(MAX_LISTED_CLASSES + 1))))
    assert f"class {MAX_LISTED_CLASSES - 1}, ...\n".replace("\n", ".") in card


@pytest.mark.parametrize(("keep", "fact"), [("best", "best epoch was kept"), ("last", "last step was kept")])
def test_card_states_which_model_was_kept(keep: str, fact: str) -> None:
    assert fact in render_card("run", {**example_report(("a", "b")), "keep": keep})


@pytest.mark.parametrize("multi_label", [False, True])
def test_card_explains_the_output(multi_label: bool) -> None:
    card = render_card("run", example_report(("a", "b"), multi_label=multi_label))
    assert ("one probability per class" in card) == multi_label
    assert ("one of its\nclasses for every image" in card) == (not multi_label)


def test_card_of_a_run_without_labels() -> None:
    card = render_card("run", masked_patches_report("pixels"))
    assert "Mean squared error 0.2500 on masked pixels" in card
    assert "fine-tuned" in card
    assert "Baseline 50.00%" in render_card("run", masked_patches_report("mean-color"))
