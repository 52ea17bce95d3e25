"""The trained model and the dataset of the evaluation tests."""

from tests.evaluation.conftest import photos as photos
from tests.evaluation.conftest import run as run
