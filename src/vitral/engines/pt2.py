"""pt2: torch's own exported programs, for C++ and for AOTInductor. Only a file that was written a moment ago is opened
here: a foreign one can run code when it is loaded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

BESIDE = "vitral.json"
"""The member of the archive that describes it."""


def check() -> None:
    """Nothing is needed but torch."""


def write(program: torch.export.ExportedProgram, path: Path, description: str) -> None:
    torch.export.save(program, path, extra_files={BESIDE: description})


def ask(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    module = torch.export.load(path).module()

    def answer(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return answer
