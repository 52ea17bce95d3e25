"""Compare ways to tell that an image is unusual: AUROC of test images of the training classes against other images.

    python -m benchmarks.novelty FLOWERS CIFAR10 WEIGHTS [--size 98] --save

Three tasks: digits given to a model of flowers (any folder with train and test), three of ten flowers left out, and
CIFAR-10 (5,000 training and 2,000 test images) with three classes left out, as a mean over five choices of them.
WEIGHTS is any checkpoint.
"""

import argparse
from collections.abc import Callable
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.label_errors import load_features
from benchmarks.timing import describe_machine, save
from vitral.data.sources import open_dataset
from vitral.evaluation.linear_probe import choose_folds, cross_validate
from vitral.inference.novelty import fit_novelty

LEFT_OUT = ((0, 1, 2), (3, 5, 8), (7, 8, 9), (0, 4, 9), (1, 2, 6))
Distance = Callable[[Tensor], Tensor]


def squared_mahalanobis(reference: Tensor, means: Tensor, labels: Tensor) -> Distance:
    """Return the squared Mahalanobis distance to the nearest mean, by scikit-learn's Ledoit-Wolf covariance."""
    from sklearn.covariance import LedoitWolf

    fitted = LedoitWolf(assume_centered=True).fit((reference - means[labels]).double().numpy())
    factor = torch.linalg.cholesky(torch.from_numpy(fitted.precision_))
    centers = means.double() @ factor
    return lambda x: torch.cdist(x.double() @ factor, centers).square().amin(1)


def fit_distances(features: Tensor, labels: Tensor) -> dict[str, Distance]:
    """Return the ways to measure how unusual features are, fitted to training features."""
    labels = labels.unique(return_inverse=True)[1]
    classes = int(labels.max()) + 1
    means = torch.stack([features[labels == label].mean(0) for label in range(classes)])
    within = squared_mahalanobis(features, means, labels)
    around = squared_mahalanobis(features, features.mean(0, keepdim=True), torch.zeros_like(labels))
    probe = cross_validate(features, labels, classes=classes, folds=choose_folds(labels)).fit()
    directions = F.normalize(features, dim=1)
    return {
        "1 - largest probability": lambda x: 1 - probe(x).softmax(1).amax(1),
        "cosine distance to the 5th neighbor": lambda x: (
            1 - (F.normalize(x, dim=1) @ directions.T).topk(5).values[:, -1]
        ),
        "Mahalanobis": within,
        "relative Mahalanobis": lambda x: within(x) - around(x),
        "vitral": fit_novelty(features, labels).distance,
    }


def area_under_curve(distance: Distance, ordinary: Tensor, other: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    truth = [0] * len(ordinary) + [1] * len(other)
    return float(roc_auc_score(truth, torch.cat([distance(ordinary), distance(other)]).numpy()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("flowers", "cifar10", "weights"):
        parser.add_argument(name)
    parser.add_argument("--size", type=int, default=98)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    areas: dict[str, dict[str, list[float]]] = {}

    def load(data: str, split: str, images: int | None = None) -> tuple[Tensor, Tensor]:
        return load_features(open_dataset(data), options.weights, images, options.size, split=split)

    def measure(task: str, features: Tensor, labels: Tensor, ordinary: Tensor, other: Tensor) -> None:
        for method, distance in fit_distances(features, labels).items():
            area = area_under_curve(distance, ordinary, other)
            areas.setdefault(method, {}).setdefault(task, []).append(area)

    digits, _ = load("builtin:digits", "test")
    (train, labels), (test, test_labels) = load(options.flowers, "train"), load(options.flowers, "test")
    measure("digits", train, labels, test, digits)
    kept, is_other = labels % 10 < 7, test_labels % 10 >= 7
    measure("flowers", train[kept], labels[kept], test[~is_other], test[is_other])
    (train, labels), (test, test_labels) = load(options.cifar10, "train", 5000), load(options.cifar10, "test", 2000)
    for classes in map(torch.tensor, LEFT_OUT):
        kept, is_other = ~torch.isin(labels, classes), torch.isin(test_labels, classes)
        measure("CIFAR-10", train[kept], labels[kept], test[~is_other], test[is_other])
    rows = [{"method": name, **{task: mean(values) for task, values in each.items()}} for name, each in areas.items()]
    for row in rows:
        print(f"| {row['method']} | {row['digits']:.3f} | {row['flowers']:.3f} | {row['CIFAR-10']:.3f} |")
    if options.save:
        save("novelty", describe_machine("scikit-learn"), rows)


if __name__ == "__main__":
    main()
