"""vitral: build, train, inspect, exchange and serve Vision Transformers.

The names below are the public face. They are loaded when first used, so that ``import vitral`` and ``vitral --help``
never wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.errors import ConfigError as ConfigError
    from vitral.errors import DataError as DataError
    from vitral.errors import VitralError as VitralError
    from vitral.model.config import ConvStem as ConvStem
    from vitral.model.config import ResNetStem as ResNetStem
    from vitral.model.config import ViTConfig as ViTConfig
    from vitral.model.features import Features as Features
    from vitral.model.record import record_attention as record_attention
    from vitral.model.vit import ViT as ViT
    from vitral.model.vit import create as create

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "errors",
    "ConvStem": "model.config",
    "DataError": "errors",
    "Features": "model.features",
    "ResNetStem": "model.config",
    "ViT": "model.vit",
    "ViTConfig": "model.config",
    "VitralError": "errors",
    "create": "model.vit",
    "record_attention": "model.record",
}
__all__ = [
    "ConfigError",
    "ConvStem",
    "DataError",
    "Features",
    "ResNetStem",
    "ViT",
    "ViTConfig",
    "VitralError",
    "__version__",
    "create",
    "record_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}")
    return getattr(import_module(f"vitral.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
