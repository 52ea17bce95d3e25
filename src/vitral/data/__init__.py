"""Images to tensors: find, check, decode, preprocess, augment and load them in a repeatable order.

`Dataset` and `loader` are for training loops of your own. They are loaded on first use, so that importing this
package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitral.data.augment import Augment as Augment
    from vitral.data.loading import Dataset as Dataset
    from vitral.data.loading import loader as loader

_MODULES = {"Augment": "augment", "Dataset": "loading", "loader": "loading"}
__all__ = ["Augment", "Dataset", "loader"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'vitral.data' has no attribute {name!r}")
    return getattr(import_module(f"vitral.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
