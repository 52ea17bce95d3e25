"""Fill a model on the meta device with the tensors of a checkpoint, by the rules of its dialect."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitral.errors import WeightsError, first_line
from vitral.model.network import Config, Network, build
from vitral.weights.checkpoint import LoadReport
from vitral.weights.dialects.native import is_finite
from vitral.weights.dialects.plan import LoadPlan, Overrides
from vitral.weights.dialects.rules import Rule
from vitral.weights.resizing import resize

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def build_on_meta(config: Config) -> Network:
    """Return the network without memory for its parameters."""
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:
        raise WeightsError(f"Cannot build a network of width {config.width}: {first_line(error)}.") from error


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class StateDictBuilder:
    """Apply the rules of a plan, one by one, to a model on the meta device."""

    def __init__(
        self, model: Network, plan: LoadPlan, overrides: Overrides, keep: Callable[[Tensor], Tensor] | None = None
    ):
        """``keep`` returns the part of a tensor to keep; the model then stays on the meta device."""
        self.keep = keep
        self.model, self.plan, self.file, self.overrides = model, plan, plan.file, overrides
        shapes = shapes_of(model)
        is_same = plan.spec.config == model.config
        self.file_shapes = shapes if is_same else shapes_of(build_on_meta(plan.spec.config))
        """Shapes of the network that the file contains."""
        self.model_shapes = {name: shape for name, shape in shapes.items() if not self.replaces(name)}
        """Shapes of the tensors that the model takes from the file."""
        self.changes = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        self.state: dict[str, Tensor] = {}
        self.unchanged: list[str] = []
        self.renamed: dict[str, str] = {}
        self.resized: dict[str, str] = {}
        self.initialized: dict[str, str] = {}
        self.ignored = {**self.file.ignored, **{self.file.prefix + name: why for name, why in plan.ignored.items()}}
        self.converted_dtypes: set[torch.dtype] = set()

    def check_coverage(self) -> None:
        """Raise WeightsError, naming both sides, unless the file and its network cover each other."""
        rules, prefix = self.plan.rules, self.file.prefix
        present, used = set(self.file.shapes), {name for rule in rules for name in rule.theirs}
        filled = {name: rule for rule in rules for name in rule.ours}
        stray = {name for ours, rule in filled.items() if ours not in self.file_shapes for name in rule.theirs}
        problems = {
            "missing": [prefix + name for name in sorted(used - present)],
            "unexpected": [prefix + name for name in sorted((present - used - set(self.plan.ignored)) | stray)],
            "missing from the network's tensors": sorted(set(self.file_shapes) - set(filled)),
        }
        if any(problems.values()):
            listed = "; ".join(f"{problem}: {_few(names)}" for problem, names in problems.items() if names)
            looks = f"{self.file.name} looks like a {self.plan.dialect} checkpoint"
            raise WeightsError(f"{looks}, but does not match. {listed}.")

    def build(self, source: str) -> LoadReport:
        """Fill the model and return the report."""
        for rule in self.plan.rules:
            self.apply(rule)
        self.initialize_rest()
        if self.keep is None:
            self.model.load_state_dict(self.state, strict=False, assign=True)
        return LoadReport(
            source=source,
            dialect=self.plan.dialect,
            format=self.file.format,
            unchanged=tuple(self.unchanged),
            renamed=self.renamed,
            resized=self.resized,
            initialized=self.initialized,
            ignored=self.ignored,
            warnings=tuple(self.warnings()),
        )

    def apply(self, rule: Rule) -> None:
        """Read the tensors of a rule, add them to the state and report what became of them."""
        theirs = [self.file.prefix + name for name in rule.theirs]
        if not any(name in self.model_shapes for name in rule.ours):
            reason = f"not part of the network with {self.changes}"
            if self.replaces(rule.ours[0]):
                reason = f"num_classes={self.overrides['num_classes']} replaces the head"
            self.ignored |= dict.fromkeys(theirs, reason)
            return
        notes = [self.add(name, tensor, rule) for name, tensor in zip(rule.ours, self.read(rule), strict=True)]
        ours = ", ".join(rule.ours)
        if not theirs:
            self.initialized |= dict.fromkeys(rule.ours, "zero: the file has none, which is equivalent")
        elif any(notes):
            self.resized |= dict.fromkeys(theirs, f"{ours}: {'; '.join(filter(None, notes))}")
        elif tuple(theirs) == rule.ours:
            self.unchanged += theirs
        else:
            self.renamed |= dict.fromkeys(theirs, ours)

    def read(self, rule: Rule) -> tuple[Tensor, ...]:
        """Return our tensors of a rule, or raise WeightsError if theirs have the wrong shape."""
        file = self.file
        try:
            tensors = rule.read(tuple(self.as_weights(name, file.read(name)) for name in rule.theirs))
            if len(tensors) == len(rule.ours):
                return tensors
            reason = f"they give {len(tensors)} tensors instead of {len(rule.ours)}"
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = first_line(error)
        shapes = ", ".join(f"{file.prefix}{name} {tuple(file.shapes[name])}" for name in rule.theirs)
        raise WeightsError(f"{file.name}: cannot build {rule.ours[0]} from {shapes}: {reason}.")

    def as_weights(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of weights, or raise WeightsError for another dtype; counters of BatchNorm are integers."""
        if tensor.dtype in _DTYPES or (tensor.dtype == torch.int64 and name.endswith("num_batches_tracked")):
            return tensor
        if tensor.is_floating_point():  # eight bits, which hardly any operation supports
            self.converted_dtypes.add(tensor.dtype)
            return tensor.float()
        dtype = _dtype_name(tensor.dtype)
        raise WeightsError(f"{self.file.name}: {self.file.prefix}{name} has dtype {dtype}; expected floating point.")

    def add(self, name: str, tensor: Tensor, rule: Rule) -> str | None:
        """Add one tensor to the state and return how it was resized, if it was."""
        subject = f"{self.file.name}: {' and '.join(self.file.prefix + name for name in rule.theirs)}"
        if tuple(tensor.shape) != self.file_shapes[name]:
            expected = self.file_shapes[name]
            raise WeightsError(f"{subject} gives {name} shape {tuple(tensor.shape)}; expected {expected}.")
        if name not in self.model_shapes:
            return None
        if not is_finite(tensor):
            raise WeightsError(f"{subject} contains NaN or Inf.")
        if tensor.is_floating_point() and tensor.dtype != torch.float32 and not self.plan.keeps_dtype:
            self.converted_dtypes.add(tensor.dtype)
            tensor = tensor.float()
        tensor, note = resize(name, tensor, self.plan.spec.config, self.model.config, self.model_shapes[name])
        self.state[name] = tensor.contiguous() if self.keep is None else self.keep(tensor)
        return note

    def initialize_rest(self) -> None:
        """Allocate and initialize the tensors that the file does not have and the caller's changes need."""
        rest = [name for name in self.model.state_dict() if name not in self.state]
        for name in rest:
            is_head = self.replaces(name)
            reason = f"head: num_classes={self.overrides['num_classes']}" if is_head else f"with {self.changes}"
            self.initialized[name] = f"new {reason}"
        dtypes = {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        for module in map(self.model.get_submodule, sorted({name.rpartition(".")[0] for name in rest})):
            try:
                module.to_empty(device="cpu", recurse=False)
            except RuntimeError as error:
                raise WeightsError(f"Out of memory for {self.changes}.", hint="Use smaller values.") from error
            module.reset_parameters()  # type: ignore[operator]
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        if self.keep is not None:
            self.state |= {name: self.keep(self.model.state_dict()[name]) for name in rest}
            self.model.to("meta")

    def replaces(self, name: str) -> bool:
        """Return whether the caller replaces this tensor with that of a new head."""
        return name.startswith("head.") and "num_classes" in self.overrides

    def warnings(self) -> list[str]:
        """Return what the user should know about the loaded values."""
        sentences = [*self.file.notes]
        head = self.state.get("head.weight")
        if head is not None and not head.any():
            sentences.append(
                "The head is all zeros, as in Google's ImageNet-21k files, so every class has the same logit. "
                "Fine-tune the model, or pass num_classes=... for a new head."
            )
        dtypes = sorted(map(_dtype_name, self.converted_dtypes))
        return sentences + [f"Converted {dtype} tensors to float32." for dtype in dtypes]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
