"""The page of an evaluation says of classes only what was measured."""

import pytest

from vitral.console.evaluation import MOST_CLASSES, worst_classes


@pytest.mark.parametrize(("classes", "there", "others"), [(5, 3, 0), (1000, 10, 0), (1000, 20, 0), (1000, 400, 380)])
def test_classes_without_pictures_are_not_better_than_those_shown(classes: int, there: int, others: int) -> None:
    rows = [{"class": str(n), "images": int(n < there), "f1": n / classes} for n in range(classes)]
    shown, more = worst_classes(rows)
    assert more == others
    if classes > MOST_CLASSES:
        assert [row["class"] for row in shown] == [str(n) for n in range(min(there, MOST_CLASSES))]
    else:
        assert shown == rows
