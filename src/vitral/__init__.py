"""vitral: build, train, evaluate, inspect and exchange Vision Transformers.

The public names are loaded on first use, so that `import vitral` and `vitral --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names as in _MODULES, for type checkers
    from vitral.api import export as export
    from vitral.api import inspect as inspect
    from vitral.api import train as train
    from vitral.api import train_events as train_events
    from vitral.data.scan import scan as scan
    from vitral.errors import ConfigError as ConfigError
    from vitral.errors import DataError as DataError
    from vitral.errors import MissingError as MissingError
    from vitral.errors import VitralError as VitralError
    from vitral.errors import WeightsError as WeightsError
    from vitral.evaluation.evaluator import evaluate as evaluate
    from vitral.evaluation.results import Evaluation as Evaluation
    from vitral.inference.predictor import Prediction as Prediction
    from vitral.inference.predictor import Predictor as Predictor
    from vitral.inspection.results import Inspection as Inspection
    from vitral.model.bit import BiT as BiT
    from vitral.model.bit_config import BiTConfig as BiTConfig
    from vitral.model.config import ConvStem as ConvStem
    from vitral.model.config import ResNetStem as ResNetStem
    from vitral.model.config import ViTConfig as ViTConfig
    from vitral.model.features import Features as Features
    from vitral.model.network import create as create
    from vitral.model.recording import record_attention as record_attention
    from vitral.model.vit import ViT as ViT
    from vitral.planning import plan as plan
    from vitral.preprocess import Preprocess as Preprocess
    from vitral.report.page import write_report as write_report
    from vitral.runs import Run as Run
    from vitral.serving.server import serve as serve
    from vitral.studies.runner import run_study as run_study
    from vitral.suites.runner import run_suite as run_suite
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.checkpoint import LoadReport as LoadReport
    from vitral.weights.convert import convert as convert
    from vitral.weights.describing import describe as describe
    from vitral.weights.load import load as load
    from vitral.weights.save import save as save

__version__ = "0.1.0"

_MODULES = {
    "api": ("export", "inspect", "train", "train_events"),
    "data.scan": ("scan",),
    "errors": ("ConfigError", "DataError", "MissingError", "VitralError", "WeightsError"),
    "evaluation.evaluator": ("evaluate",),
    "evaluation.results": ("Evaluation",),
    "inference.predictor": ("Prediction", "Predictor"),
    "inspection.results": ("Inspection",),
    "model.bit": ("BiT",),
    "model.bit_config": ("BiTConfig",),
    "model.config": ("ConvStem", "ResNetStem", "ViTConfig"),
    "model.features": ("Features",),
    "model.network": ("create",),
    "model.recording": ("record_attention",),
    "model.vit": ("ViT",),
    "planning": ("plan",),
    "preprocess": ("Preprocess",),
    "report.page": ("write_report",),
    "runs": ("Run",),
    "serving.server": ("serve",),
    "studies.runner": ("run_study",),
    "suites.runner": ("run_suite",),
    "weights.checkpoint": ("Checkpoint", "LoadReport"),
    "weights.convert": ("convert",),
    "weights.describing": ("describe",),
    "weights.load": ("load",),
    "weights.save": ("save",),
}
_MODULE_OF = {name: f"vitral.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in ("data", "inspection"):  # packages with public names of their own
        return import_module(f"vitral.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
