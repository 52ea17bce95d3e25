"""vitral: build, train, measure, look into and exchange Vision Transformers.

The names below are the public face. They are loaded when first used, so that ``import vitral`` and ``vitral --help``
never wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.api import train_events as train_events
    from vitral.errors import ConfigError as ConfigError
    from vitral.errors import DataError as DataError
    from vitral.errors import VitralError as VitralError
    from vitral.errors import WeightsError as WeightsError
    from vitral.evaluation.evaluator import evaluate as evaluate
    from vitral.evaluation.results import Evaluation as Evaluation
    from vitral.inference.predictor import Prediction as Prediction
    from vitral.inference.predictor import Predictor as Predictor
    from vitral.model.bit import BiT as BiT
    from vitral.model.bit_config import BiTConfig as BiTConfig
    from vitral.model.config import ConvStem as ConvStem
    from vitral.model.config import ResNetStem as ResNetStem
    from vitral.model.config import ViTConfig as ViTConfig
    from vitral.model.features import Features as Features
    from vitral.model.network import create as create
    from vitral.model.recording import record_attention as record_attention
    from vitral.model.vit import ViT as ViT
    from vitral.preprocess import Preprocess as Preprocess
    from vitral.report.page import write_report as write_report
    from vitral.suites.runner import run_suite as run_suite
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.checkpoint import LoadReport as LoadReport
    from vitral.weights.load import load as load
    from vitral.weights.save import save as save

__version__ = "0.1.0"

_HOME = {
    "BiT": "model.bit",
    "BiTConfig": "model.bit_config",
    "Checkpoint": "weights.checkpoint",
    "ConfigError": "errors",
    "ConvStem": "model.config",
    "DataError": "errors",
    "Evaluation": "evaluation.results",
    "Features": "model.features",
    "LoadReport": "weights.checkpoint",
    "Prediction": "inference.predictor",
    "Predictor": "inference.predictor",
    "Preprocess": "preprocess",
    "ResNetStem": "model.config",
    "ViT": "model.vit",
    "ViTConfig": "model.config",
    "VitralError": "errors",
    "WeightsError": "errors",
    "create": "model.network",
    "evaluate": "evaluation.evaluator",
    "load": "weights.load",
    "record_attention": "model.recording",
    "run_suite": "suites.runner",
    "save": "weights.save",
    "train_events": "api",
    "write_report": "report.page",
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
    "LoadReport",
    "Prediction",
    "Predictor",
    "Preprocess",
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
    "train_events",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}")
    return getattr(import_module(f"vitral.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
