"""vitral: build, train, measure, look into and exchange Vision Transformers.

The names below are the public face. They are loaded when first used, so that ``import vitral`` and ``vitral --help``
never wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.errors import ConfigError as ConfigError
    from vitral.errors import DataError as DataError
    from vitral.errors import VitralError as VitralError
    from vitral.errors import WeightsError as WeightsError
    from vitral.measure.evaluate import evaluate as evaluate
    from vitral.measure.evaluation import Evaluation as Evaluation
    from vitral.model.bit import BiT as BiT
    from vitral.model.bit_config import BiTConfig as BiTConfig
    from vitral.model.config import ConvStem as ConvStem
    from vitral.model.config import ResNetStem as ResNetStem
    from vitral.model.config import ViTConfig as ViTConfig
    from vitral.model.features import Features as Features
    from vitral.model.network import create as create
    from vitral.model.record import record_attention as record_attention
    from vitral.model.vit import ViT as ViT
    from vitral.predict import Prediction as Prediction
    from vitral.predict import Predictor as Predictor
    from vitral.preprocess import Preprocess as Preprocess
    from vitral.show.report import write_report as write_report
    from vitral.suites.run import run_suite as run_suite
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.load import load as load
    from vitral.weights.report import Report as Report
    from vitral.weights.save import save as save

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "weights.checkpoint",
    "ConfigError": "errors",
    "ConvStem": "model.config",
    "DataError": "errors",
    "Evaluation": "measure.evaluation",
    "Features": "model.features",
    "Prediction": "predict",
    "Predictor": "predict",
    "Preprocess": "preprocess",
    "Report": "weights.report",
    "ResNetStem": "model.config",
    "BiT": "model.bit",
    "BiTConfig": "model.bit_config",
    "ViT": "model.vit",
    "ViTConfig": "model.config",
    "VitralError": "errors",
    "WeightsError": "errors",
    "create": "model.network",
    "evaluate": "measure.evaluate",
    "load": "weights.load",
    "record_attention": "model.record",
    "run_suite": "suites.run",
    "save": "weights.save",
    "write_report": "show.report",
}
__all__ = [
    "BiT",
    "BiTConfig",
    "Checkpoint",
    "ConfigError",
    "ConvStem",
    "DataError",
    "Evaluation",
    "Features",
    "Prediction",
    "Predictor",
    "Preprocess",
    "Report",
    "ResNetStem",
    "ViT",
    "ViTConfig",
    "VitralError",
    "WeightsError",
    "__version__",
    "create",
    "evaluate",
    "load",
    "record_attention",
    "run_suite",
    "save",
    "train",  # pyright: ignore[reportUnsupportedDunderAll]
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("vitral.train")  # a room that can be called
    if name not in _HOME:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}")
    return getattr(import_module(f"vitral.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
