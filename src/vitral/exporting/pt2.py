"""pt2: torch's own exported programs, for C++ and AOTInductor.

Loading a foreign .pt2 file can run code, so vitral only loads the file that it wrote a moment ago.
"""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import nn

MEMBER = "vitral.json"
"""Member of the archive with the JSON that describes the model."""


def check() -> None:
    """Do nothing: torch is all that this format needs."""


def prepare(network: nn.Module) -> None:
    """Do nothing: torch traces the network as it is."""


def write(program: torch.export.ExportedProgram, path: Path, output: str, metadata: str) -> None:
    content = BytesIO()  # torch's own file writer kills the process on a full disk
    torch.export.save(program, content, extra_files={MEMBER: metadata})
    path.write_bytes(content.getbuffer())


def load(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    module = torch.export.load(BytesIO(path.read_bytes())).module()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return run
