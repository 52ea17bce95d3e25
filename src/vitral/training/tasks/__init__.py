"""Tasks: the parts of a run that differ between learning from labels and learning from images alone."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from vitral.data.batches import Batch
from vitral.data.dataset import Item
from vitral.evaluation.metrics import Scores
from vitral.model.network import Network
from vitral.training.events import Event

if TYPE_CHECKING:
    from vitral.runs import Run
    from vitral.training.token_loader import Loader


class Corruption(NamedTuple):
    """The changes to the patch embeddings of a batch."""

    corrupted: Tensor
    """(B, M): the patches to predict; some of them keep their embedding."""
    masked: Tensor
    """(B, N): whether a patch gets the mask embedding."""
    source: Tensor
    """(B, N): the patch whose embedding each one gets: itself, unless it was swapped."""


class PreparedBatch(NamedTuple):
    """A batch on its device."""

    images: Any
    """(B, C, H, W), a list of (C, H, W) of any sizes, or (B, N, D) tokens."""
    targets: Tensor
    corruption: Corruption | None = None
    whole: Tensor | None = None
    """The targets of the whole batch, if several processes train on it."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A model's scores on a split."""

    scores: Scores
    unreadable: Sequence[tuple[str, str]]
    """Names of the images that could not be read, with the reasons."""
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    """For the test split: the content of `test` in report.json."""


class Task(Protocol):
    """A training objective: targets, loss and scores."""

    @property
    def extra(self) -> nn.Module:
        """Parameters that are trained and saved beside the network and are not part of the model."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Return whether the compiled network is trained."""
        ...

    def prepare(self, batch: Batch, step: int) -> PreparedBatch:
        """Move a batch to the device, with its targets; random numbers depend on the step."""
        ...

    def compile_network(self, is_compiled: bool) -> None:
        """Train with the compiled network, or with the eager one."""
        ...

    def forward(self, batch: PreparedBatch, part: slice) -> Tensor:
        """Run the network on a part of a batch, under autocast if there is any."""
        ...

    def loss(self, outputs: Tensor, batch: PreparedBatch, part: slice) -> Tensor:
        """Return the part's share of the loss of the whole batch."""
        ...

    def measure(self, model: Network, loader: "Loader", split: str) -> Generator[Event, None, Measurement]:
        """Run a model over the "validation" or the "test" split."""
        ...

    def draw(
        self, model: Network, run: "Run", report: dict[str, Any], images: Sequence[Item], *, seconds: float
    ) -> None:
        """Draw images of the test split for the report, in about so many seconds at most."""
