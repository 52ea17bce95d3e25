"""Write one test image of each built-in digit as a file, to predict.

python examples/digits.py FOLDER
"""

import sys
from pathlib import Path

from PIL import Image

from vitral.data.sources import open_dataset


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = open_dataset("builtin:digits")
    items = {item.label: item for item in data.splits["test"]}
    for label, item in items.items():
        assert isinstance(label, int)
        pixels = item.source.read()
        assert not isinstance(pixels, bytes)
        Image.fromarray(pixels[..., 0]).save(folder / f"a-{data.classes[label]}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits"))
