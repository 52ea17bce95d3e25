"""The per-class table of an evaluation."""

import pytest

from vitral.console.results import MAX_CLASSES, worst_classes


@pytest.mark.parametrize(("classes", "present", "hidden"), [(5, 3, 0), (1000, 10, 0), (1000, 20, 0), (1000, 400, 380)])
def test_classes_without_images_are_neither_shown_nor_counted(classes: int, present: int, hidden: int) -> None:
    rows = [{"class": str(n), "images": int(n < present), "f1": n / classes} for n in range(classes)]
    shown, more = worst_classes(rows)
    assert more == hidden
    if classes > MAX_CLASSES:
        assert [row["class"] for row in shown] == [str(n) for n in range(min(present, MAX_CLASSES))]
    else:
        assert shown == rows
