"""What a batch teaches: from pictures and labels to a loss. To name what is shown, or to fill in what is hidden."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitral.data.augment import random_generator
from vitral.data.batches import Batch
from vitral.data.transforms import normalize
from vitral.errors import ConfigError
from vitral.inference.loaded_model import to_device
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.training.config import TrainConfig
from vitral.training.masked_patches import Corruption, MaskedPatches, draw_corruption
from vitral.training.mixing import as_targets, mix_batch, soft_loss

_MIXING = 2**40 - 2  # the "sample" whose randomness mixes or corrupts a batch


class Prepared(NamedTuple):
    """A batch on its device."""

    images: Any
    targets: Tensor
    corruption: Corruption | None = None

    def __len__(self) -> int:
        return len(self.targets)


class Objective(ABC):
    def __init__(self, model: Network, preprocess: Preprocess, config: TrainConfig):
        self.model, self.preprocess, self.config = model, preprocess, config
        self.device = torch.device(config.device)
        self.extra = nn.Module()  # parameters that are trained beside the network, and left behind

    @abstractmethod
    def prepare(self, batch: Batch, step: int) -> Prepared: ...

    @abstractmethod
    def answer(self, prepared: Prepared, share: slice) -> Tensor:
        """What the network makes of a part of the batch; under autocast, where there is one."""

    @abstractmethod
    def loss(self, answers: Tensor, prepared: Prepared, share: slice) -> Tensor:
        """Its part of the loss of the whole batch."""


class Classify(Objective):
    def __init__(
        self,
        model: Network,
        preprocess: Preprocess,
        config: TrainConfig,
        *,
        multi_label: bool,
        class_weights: Tensor | None,
    ):
        super().__init__(model, preprocess, config)
        self.kind = "sigmoid" if multi_label else config.loss.kind
        self.forward: Callable[..., Any] = torch.compile(model) if config.compile else model
        self.class_weights = None if class_weights is None else class_weights.to(self.device)

    def prepare(self, batch: Batch, step: int) -> Prepared:
        targets = as_targets(batch.labels, self.model.config.num_classes, self.config.loss.smoothing).to(self.device)
        images = to_device(batch.images, self.preprocess, self.device)
        if isinstance(images, Tensor):
            random = random_generator(self.config.seed, step, _MIXING)
            images, targets = mix_batch(images, targets, self.config.mix, random)
        return Prepared(images, targets)

    def answer(self, prepared: Prepared, share: slice) -> Tensor:
        return self.forward(prepared.images[share])

    def loss(self, answers: Tensor, prepared: Prepared, share: slice) -> Tensor:
        return soft_loss(answers, prepared.targets[share], self.kind, self.class_weights, whole=prepared.targets)


class FillIn(Objective):
    """Masked patch prediction."""

    model: ViT
    extra: MaskedPatches

    def __init__(self, model: Network, preprocess: Preprocess, config: TrainConfig):
        super().__init__(model, preprocess, config)
        if not isinstance(model, ViT):
            raise ConfigError("objective='masked-patches' hides patches, and a BiT has none.", hint="Use a ViT.")
        if preprocess.resize == "native":
            raise ConfigError("objective='masked-patches' needs pictures of one size.", hint="Use resize=crop.")
        if config.mix.mixup or config.mix.cutmix:
            raise ConfigError("objective='masked-patches' does not mix pictures.", hint="Leave mix out.")
        self.grid = model.config.grid(*model.config.image_hw)
        self.extra = MaskedPatches(model.config, config.masking).to(self.device)
        predict = self.extra.predict
        self.forward: Callable[..., Tensor] = torch.compile(predict) if config.compile else predict

    def prepare(self, batch: Batch, step: int) -> Prepared:
        assert isinstance(batch.images, Tensor)
        pixels = batch.images.to(self.device)
        images = normalize(pixels, self.preprocess)
        seed = int(random_generator(self.config.seed, step, _MIXING).integers(2**62))
        number = self.grid[0] * self.grid[1]
        generator = torch.Generator().manual_seed(seed)
        corruption = draw_corruption(len(images), number, self.config.masking, generator).to(self.device)
        return Prepared(images, corruption.of_asked(self.extra.targets(pixels, images)), corruption)

    def answer(self, prepared: Prepared, share: slice) -> Tensor:
        assert prepared.corruption is not None
        return self.forward(self.model, prepared.images[share], prepared.corruption.part(share))

    def loss(self, answers: Tensor, prepared: Prepared, share: slice) -> Tensor:
        return self.extra.loss(answers, prepared.targets[share]) * len(answers) / len(prepared)
