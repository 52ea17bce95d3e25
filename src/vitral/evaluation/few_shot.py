"""What frozen features are worth with a few pictures of each class: the paper's closed-form few-shot regression
(section 4.1), and nearest neighbours. Both take seconds, so they are the baseline of every fine-tuning."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import ConfigError

L2, BIAS, EPSILON = 2.0**10, 100.0, 1e-5
_CELLS = 2**26  # of a table of distances that is in memory at a time


def few_shot(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, classes: int) -> float:
    """Top-1 of a ridge regression from the features of a few pictures to targets of -1 and 1."""
    weights = fit_ridge(_whitened(train, train), _targets(train_labels, classes))
    answers = (_whitened(test, train) @ weights).argmax(1)
    return (answers == test_labels).double().mean().item()


def choose_shots(labels: Tensor, shots: int, seed: int) -> Tensor:
    """The first few of each class, after a shuffle by the seed, so that fewer are a part of more; all of a class that
    has not as many."""
    random = np.random.default_rng(seed)
    chosen = []
    for label in labels.unique().tolist():
        own = (labels == label).nonzero()[:, 0]
        chosen.append(own[torch.from_numpy(random.permutation(len(own))[:shots])])
    return torch.cat(chosen)


def _whitened(features: Tensor, reference: Tensor) -> Tensor:
    """(N, D) -> (N, D + 1): each feature by the reference's mean and deviation, and a constant."""
    features, reference = features.double(), reference.double()
    scaled = (features - reference.mean(0)) / (reference.std(0, unbiased=False) + EPSILON)
    return F.pad(scaled, (0, 1), value=BIAS)


def _targets(labels: Tensor, classes: int) -> Tensor:
    return 2.0 * F.one_hot(labels, classes).double() - 1.0


def fit_ridge(x: Tensor, y: Tensor) -> Tensor:
    """(D, K): the least squares with an L2 penalty, through the smaller of the two Gram matrices."""
    is_wide = x.shape[0] < x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if is_wide else x.T @ x)
    inner = y if is_wide else x.T @ y
    solved = vectors @ ((vectors.T @ inner) / (values + L2)[:, None])
    return x.T @ solved if is_wide else solved


def neighbours(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, k: int, classes: int
) -> float:
    """Top-1 of a vote among the k nearest by cosine; a tie goes to the class whose voters are nearer in sum."""
    if not 1 <= k <= len(train):
        raise ConfigError(f"knn={k} must be from 1 to the number of training pictures, {len(train)}.")
    train, test = F.normalize(train.double(), dim=1), F.normalize(test.double(), dim=1)
    answers = []
    for part in test.split(max(1, _CELLS // len(train))):
        nearness, who = (part @ train.T).topk(k, dim=1)
        votes = torch.zeros(len(part), classes, dtype=torch.double)
        votes.scatter_add_(1, train_labels[who], 1 + nearness / (4 * k))  # nearness adds up to less than a vote
        answers.append(votes.argmax(1))
    return (torch.cat(answers) == test_labels).double().mean().item()
