"""Writes ten of the built-in held-out digits as picture files, one of each: something to predict.

python examples/digits.py FOLDER
"""

import sys
from pathlib import Path

from PIL import Image

from vitral.data.sources import open_dataset


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = open_dataset("builtin:digits")
    chosen = {item.label: item for item in data.splits["test"]}
    for label, item in chosen.items():
        assert isinstance(label, int)
        pixels = item.source.read()
        assert not isinstance(pixels, bytes)
        Image.fromarray(pixels[..., 0]).save(folder / f"a-{data.classes[label]}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits"))
