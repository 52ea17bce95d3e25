"""Render the plots, which the other tests leave empty."""

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="module", autouse=True)
def _rendering(_no_rendering: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", Figure.savefig.__wrapped__)  # type: ignore[attr-defined]
        yield
