"""Fill a model on the meta device with the tensors of a checkpoint, by the rules of its dialect."""

import torch
from torch import Tensor, nn

from vitral.errors import WeightsError, first_line
from vitral.model.network import Config, Network, build
from vitral.weights.checkpoint import LoadReport
from vitral.weights.dialects.plan import LoadPlan, Overrides
from vitral.weights.dialects.rules import Rule
from vitral.weights.resizing import resize

Shapes = dict[str, tuple[int, ...]]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def build_on_meta(config: Config) -> Network:
    """Return the network without memory for its parameters."""
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:
        raise WeightsError(f"Cannot build a network of width {config.width}: {first_line(error)}.") from error


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shape of every tensor in the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


class StateDictBuilder:
    """Apply the rules of a plan, one by one, to a model on the meta device."""

    def __init__(self, model: Network, plan: LoadPlan, overrides: Overrides):
        self.model, self.plan, self.overrides = model, plan, overrides
        self.model_shapes = shapes_of(model)
        """Shapes of the tensors that the model takes from the file."""
        is_same = plan.spec.config == model.config
        self.file_shapes = self.model_shapes if is_same else shapes_of(build_on_meta(plan.spec.config))
        """Shapes of the network that the file contains."""
        self.model_shapes = {name: shape for name, shape in self.model_shapes.items() if not self.replaces(name)}
        self.state: dict[str, Tensor] = {}
        self.unchanged: list[str] = []
        self.renamed: dict[str, str] = {}
        self.resized: dict[str, str] = {}
        ignored = {plan.file.prefix + name: reason for name, reason in plan.ignored.items()}
        self.ignored = {**plan.file.ignored, **ignored}
        self.initialized: dict[str, str] = {}
        self.converted_dtypes: set[torch.dtype] = set()

    def check_coverage(self) -> None:
        """Raise WeightsError, naming both sides, unless the file and its network cover each other."""
        plan, prefix = self.plan, self.plan.file.prefix
        present, used = set(plan.file.shapes), {name for rule in plan.rules for name in rule.theirs}
        filled = {name: rule for rule in plan.rules for name in rule.ours}
        stray = {name for ours, rule in filled.items() if ours not in self.file_shapes for name in rule.theirs}
        problems = {
            "missing": [prefix + name for name in sorted(used - present)],
            "unexpected": [prefix + name for name in sorted((present - used - set(plan.ignored)) | stray)],
            "missing from the network's tensors": sorted(set(self.file_shapes) - set(filled)),
        }
        if any(problems.values()):
            listed = "; ".join(f"{problem}: {_few(names)}" for problem, names in problems.items() if names)
            looks = f"{plan.file.name} looks like a {plan.dialect} checkpoint"
            raise WeightsError(f"{looks}, but does not match. {listed}.")

    def build(self, source: str) -> LoadReport:
        """Fill the model and return the report."""
        for rule in self.plan.rules:
            self.apply(rule)
        self.initialize_rest()
        self.model.load_state_dict(self.state, strict=False, assign=True)
        return LoadReport(
            source=source,
            dialect=self.plan.dialect,
            format=self.plan.file.format,
            unchanged=tuple(self.unchanged),
            renamed=self.renamed,
            resized=self.resized,
            initialized=self.initialized,
            ignored=self.ignored,
            warnings=tuple(self.warnings()),
        )

    def apply(self, rule: Rule) -> None:
        """Read the tensors of a rule, add them to the state and report what became of them."""
        theirs = [self.plan.file.prefix + name for name in rule.theirs]
        if not any(name in self.model_shapes for name in rule.ours):
            self.ignored |= dict.fromkeys(theirs, self.reason_ignored(rule.ours[0]))
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
        file = self.plan.file
        try:
            tensors = rule.read(tuple(self.as_weights(name, file.read(name)) for name in rule.theirs))
            if len(tensors) == len(rule.ours):
                return tensors
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = first_line(error)
        else:
            reason = f"they give {len(tensors)} tensors instead of {len(rule.ours)}"
        shapes = ", ".join(f"{file.prefix}{name} {tuple(file.shapes[name])}" for name in rule.theirs)
        raise WeightsError(f"{file.name}: cannot build {rule.ours[0]} from {shapes}: {reason}.")

    def as_weights(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of weights, or raise WeightsError for another dtype; counters of BatchNorm are integers."""
        if tensor.dtype in _DTYPES or (tensor.dtype == torch.int64 and name.endswith("num_batches_tracked")):
            return tensor
        if tensor.is_floating_point():  # eight bits, which hardly any operation supports
            self.converted_dtypes.add(tensor.dtype)
            return tensor.float()
        file = self.plan.file
        raise WeightsError(
            f"{file.name}: {file.prefix}{name} has dtype {dtype_name(tensor.dtype)}; expected floating point."
        )

    def add(self, name: str, tensor: Tensor, rule: Rule) -> str | None:
        """Add one tensor to the state and return how it was resized, if it was."""
        file = self.plan.file
        theirs = " and ".join(file.prefix + name for name in rule.theirs)
        if tuple(tensor.shape) != self.file_shapes[name]:
            raise WeightsError(
                f"{file.name}: {theirs} gives {name} shape {tuple(tensor.shape)}; expected {self.file_shapes[name]}."
            )
        if name not in self.model_shapes:
            return None
        if tensor.is_floating_point() and tensor.numel():
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise WeightsError(f"{file.name}: {theirs} contains NaN or Inf.")
            if tensor.dtype != torch.float32 and not self.plan.keeps_dtype:
                self.converted_dtypes.add(tensor.dtype)
                tensor = tensor.float()
        tensor, note = resize(name, tensor, self.plan.spec.config, self.model.config, self.model_shapes[name])
        self.state[name] = tensor.contiguous()
        return note

    def initialize_rest(self) -> None:
        """Allocate and initialize the tensors that the file does not have and the caller's changes need."""
        for name in self.model.state_dict():
            if name not in self.state:
                is_head = self.replaces(name)
                reason = f"head: num_classes={self.overrides['num_classes']}" if is_head else f"with {self.changes()}"
                self.initialized[name] = f"new {reason}"
        modules = {name.rpartition(".")[0] for name in self.initialized if name not in self.state}
        dtypes = {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        for module in map(self.model.get_submodule, sorted(modules)):
            try:
                module.to_empty(device="cpu", recurse=False)
            except RuntimeError as error:
                raise WeightsError(f"Out of memory for {self.changes()}.", hint="Use smaller values.") from error
            module.reset_parameters()  # type: ignore[operator]
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)

    def replaces(self, name: str) -> bool:
        """Return whether the caller replaces this tensor with that of a new head."""
        return name.startswith("head.") and "num_classes" in self.overrides

    def reason_ignored(self, ours: str) -> str:
        """Return why the model does not take a tensor of the file."""
        if self.replaces(ours):
            return f"num_classes={self.overrides['num_classes']} replaces the head"
        return f"not part of the network with {self.changes()}"

    def changes(self) -> str:
        """Return the caller's changes as they were passed."""
        return ", ".join(f"{name}={value!r}" for name, value in self.overrides.items())

    def warnings(self) -> list[str]:
        """Return what the user should know about the loaded values."""
        sentences = [*self.plan.file.notes]
        head = self.state.get("head.weight")
        if head is not None and not head.any():
            sentences.append(
                "The head is all zeros, as in Google's ImageNet-21k files, so every class has the same logit. "
                "Fine-tune the model, or pass num_classes=... for a new head."
            )
        dtypes = sorted(map(dtype_name, self.converted_dtypes))
        return sentences + [f"Converted {dtype} tensors to float32." for dtype in dtypes]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
