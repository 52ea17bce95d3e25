"""pt2: torch's own exported programs, for C++ and for AOTInductor. Only a file that was written a moment ago is opened
here: a foreign one can run code when it is loaded."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import nn

BESIDE = "vitral.json"
"""The member of the archive that describes it."""


def check() -> None:
    """Nothing is needed but torch."""


def prepare(network: nn.Module) -> None:
    """It is taken as it is."""


def write(program: torch.export.ExportedProgram, path: Path, answers: str, description: str) -> None:
    content = BytesIO()  # torch's own writer ends the process on a full disk
    torch.export.save(program, content, extra_files={BESIDE: description})
    path.write_bytes(content.getbuffer())


def ask(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    module = torch.export.load(BytesIO(path.read_bytes())).module()

    def answer(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return answer
