"""Look inside a Vision Transformer: where it looks and what it learned, as pure functions on tensors.

    rollout(model, images)               where the prediction comes from, by attention
    relevance(model, images, labels)     which patches speak for a class
    attention_distance(model, images)    how far each head looks, in pixels
    token_norms(model, images)           the length of every patch token after each layer
    token_similarity(model, images)      how alike the patch tokens are after each layer
    feature_pca(model, images)           patch features as colors
    position_similarity(model)           how alike the position embeddings are
    patch_filters(model)                 principal components of the patch projection
    faithfulness(model, images, maps)    whether deleting the patches that a map ranks highest changes the prediction

Images are normalized: (B, C, H, W), or a list of (C, H, W) of any sizes. Names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names as in _MODULES, for type checkers
    from vitral.inspection.attention_maps import attention_distance as attention_distance
    from vitral.inspection.attention_maps import rollout as rollout
    from vitral.inspection.class_relevance import relevance as relevance
    from vitral.inspection.deletion import Faithfulness as Faithfulness
    from vitral.inspection.deletion import faithfulness as faithfulness
    from vitral.inspection.learned import patch_filters as patch_filters
    from vitral.inspection.learned import position_similarity as position_similarity
    from vitral.inspection.results import Inspection as Inspection
    from vitral.inspection.token_maps import feature_pca as feature_pca
    from vitral.inspection.token_maps import token_norms as token_norms
    from vitral.inspection.token_maps import token_similarity as token_similarity
    from vitral.inspection.traversal import relevance_bytes as relevance_bytes

_MODULES = {
    "attention_maps": ("attention_distance", "rollout"),
    "class_relevance": ("relevance",),
    "deletion": ("Faithfulness", "faithfulness"),
    "learned": ("patch_filters", "position_similarity"),
    "results": ("Inspection",),
    "token_maps": ("feature_pca", "token_norms", "token_similarity"),
    "traversal": ("relevance_bytes",),
}
_MODULE_OF = {name: f"vitral.inspection.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitral.inspection' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
