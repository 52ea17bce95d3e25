"""A small dataset for studies: ten training images and five test images of each digit, as shards."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitral.data.sources import open_dataset


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    index = open_dataset("builtin:digits")
    by_class = {label: [item for item in index.splits["train"] if item.label == label] for label in range(10)}
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(index.classes))
    for split, chosen in (("train", slice(10)), ("test", slice(10, 15))):
        with tarfile.open(folder / f"{split}-000.tar", "w") as tar:
            for label, items in by_class.items():
                for number, item in enumerate(items[chosen]):
                    stream = io.BytesIO()
                    pixels = item.source.read()
                    assert isinstance(pixels, np.ndarray)
                    Image.fromarray(pixels.squeeze()).save(stream, "PNG")
                    for suffix, content in (("png", stream.getvalue()), ("cls", str(label).encode())):
                        info = tarfile.TarInfo(f"{label}-{number}.{suffix}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    return folder
