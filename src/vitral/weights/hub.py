"""Find the files of a model name: a path, a shipped or pretrained name, or a repository of the Hugging Face hub.

The hub client also serves datasets. It prints what it downloads, how large it is and where to, before it starts, and
checks the sizes and SHA-256 that the hub publishes. Without a connection it uses the cache.
"""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from vitral.errors import (
    ConfigError,
    DataError,
    VitralError,
    WeightsError,
    did_you_mean,
    first_line,
    missing_package,
    short_repr,
)
from vitral.files import sha256_of
from vitral.model.sizes import canonical_name
from vitral.weights.pretrained import PRETRAINED
from vitral.weights.shipped import SHIPPED, shipped_weights

_SIDECARS = ("config.json", "preprocessor_config.json")
_CHECKPOINTS = ("model.safetensors", "pytorch_model.bin")
_File = TypeVar("_File")


class HubUnreachableError(Exception):
    """The hub did not answer; its message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """Size and checksum of a file, as far as the hub publishes them."""

    size: int | None
    sha256: str | None

    def problem(self, path: Path, *, is_new: bool) -> str | None:
        """Return how a local copy differs, if it does. Only a new file is hashed."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"it has {size:,} bytes; expected {self.size:,}"
        if is_new and self.sha256 is not None and sha256_of(path) != self.sha256:
            return "its SHA-256 does not match"
        return None

    def is_cached(self, path: object) -> bool:
        """Return whether the cache has this version. It names large files by their SHA-256."""
        if not isinstance(path, str):
            return False
        blob = Path(path).resolve()
        return self.sha256 is None or blob.parent.name != "blobs" or blob.name == self.sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A repository of the Hugging Face hub."""

    name: str
    """owner/name."""
    revision: str | None = None
    """A branch, tag or commit; None for the default branch."""
    kind: Literal["model", "dataset"] = "model"

    def error(self, message: str, hint: str | None = None) -> VitralError:
        """Return the error of this kind of repository."""
        return (WeightsError if self.kind == "model" else DataError)(message, hint=hint)

    def list_files(self) -> dict[str, HubFile]:
        """Return every file by its name; raise HubUnreachableError without a connection."""
        try:
            from huggingface_hub import HfApi, constants, errors
        except ImportError:
            raise missing_package("huggingface_hub", "hub", f"hf:{self.name}") from None
        try:
            info = HfApi().repo_info(
                self.name,
                revision=self.revision,
                repo_type=self.kind,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except errors.RevisionNotFoundError as error:
            raise self.error(f"The {self.kind} {self.name} has no revision {self.revision}.") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise self.error(
                f"There is no public {self.kind} {self.name} on the Hugging Face hub.",
                hint="Check the name. For a private or gated repository run `hf auth login`.",
            ) from error
        except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
            raise HubUnreachableError(first_line(error)) from error
        siblings = info.siblings or ()  # pyright: ignore[reportAttributeAccessIssue]
        return {
            file.rfilename: HubFile(size=file.size, sha256=file.lfs.sha256 if file.lfs else None) for file in siblings
        }

    def download(self, files: Mapping[str, HubFile]) -> dict[str, Path]:
        """Download the files that are not in the cache, check them, and return the local path of each."""
        from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

        cached = {file: try_to_load_from_cache(self.name, file, None, self.revision, self.kind) for file in files}
        if missing := [file for file in files if not files[file].is_cached(cached[file])]:
            size = sum(files[file].size or 0 for file in missing) / 1e6
            names = missing[0] if len(missing) == 1 else f"{len(missing)} files, {', '.join(missing[:3])}"
            line = f"hf:{self.name}: downloading {names} ({size:,.1f} MB) to {constants.HF_HUB_CACHE}"
            print(line, file=sys.stderr, flush=True)
        try:
            paths = {
                file: Path(hf_hub_download(self.name, file, revision=self.revision, repo_type=self.kind))
                for file in reversed([*files])  # the JSON files before the weights, which are useless without them
            }
        except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
            hint = "Try again; finished files are kept. For a gated repository run `hf auth login`."
            raise self.error(f"Cannot download hf:{self.name}: {first_line(error)}.", hint=hint) from error
        for file in files:
            if problem := files[file].problem(paths[file], is_new=file in missing):
                paths[file].resolve().unlink(missing_ok=True)
                paths[file].unlink(missing_ok=True)
                hint = "vitral removed it. Run the command again."
                raise self.error(f"hf:{self.name}: {file} is damaged: {problem}.", hint=hint)
        return {file: paths[file] for file in files}

    def cached_folder(self, reason: HubUnreachableError) -> Path:
        """Return the folder of this repository in the cache, or raise an error with the reason for needing it."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE

        try:
            folder = snapshot_download(
                self.name, repo_type=self.kind, revision=self.revision, local_files_only=True, cache_dir=HF_HUB_CACHE
            )
        except Exception:  # the hub raises several types for a repository that is not in the cache
            raise self.not_cached(reason) from reason
        return Path(folder)

    def not_cached(self, reason: HubUnreachableError) -> VitralError:
        """Return the error for a repository that is needed without a connection."""
        problem = f"hf:{self.name} is not in the cache, and the hub is unreachable: {reason}."
        return self.error(problem, hint="Connect and try again, or pass a local path.")


def locate(source: str | Path) -> Path:
    """Return the path of a checkpoint; download ``hf:owner/name`` or a pretrained name if necessary.

    A local path takes precedence over a shipped or pretrained model of the same name. ``file.npz:img`` names the image
    tower of two.
    """
    if isinstance(source, str) and source.startswith("hf:"):
        return fetch(source.removeprefix("hf:"))
    if not isinstance(source, str | Path) or not str(source):
        raise WeightsError(f"A checkpoint must be a path, a name or a state dict (got {short_repr(source)}).")
    path = Path(str(source).removesuffix(":img"))
    try:
        path = path.expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user's home, a zero byte
        raise WeightsError(f"{str(path)[:200]} is not a valid path: {first_line(error)[:200]}.") from error
    if not exists:
        name = str(source).rstrip("/\\")
        if shipped := shipped_weights(name):
            return shipped
        if name in PRETRAINED:
            return fetch(PRETRAINED[name].repository)
        raise WeightsError(f"File or folder not found: {source}.", hint=_hint(str(source)))
    return path


def _hint(name: str) -> str | None:
    """Return a hint for the name of an untrained network, a misspelled name, or a repository."""
    with suppress(ConfigError):
        network = canonical_name(name)
        return f"{network} is a network without weights. Train it with `vitral train DATA --model {network}`."
    if hint := did_you_mean(name, (*SHIPPED, *PRETRAINED)):
        return hint
    if Path(name).parent.name == "runs":
        return "Run `vitral runs` to list your runs."
    looks_like_repository = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).suffix
    if looks_like_repository:
        return f"For a repository of the Hugging Face hub, pass hf:{name}"
    is_bare = not set("/\\.~") & set(name)
    return "Run `vitral models --pretrained` to list the names of checkpoints." if is_bare else None


def fetch(address: str) -> Path:
    """Return the local folder or file of a checkpoint; ``address`` is owner/name or owner/name@revision."""
    name, _, revision = address.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise WeightsError(f"hf:{address} is not the name of a repository (expected hf:owner/name).")
    repository = Repository(name=name, revision=revision or None)
    try:
        files = choose_files(address, repository.list_files())
    except HubUnreachableError as error:
        folder = repository.cached_folder(error)
        names = [path.name for path in folder.iterdir()]
        if any(map(_is_standard, names)):
            return folder
        if only := _only_checkpoint(names):
            return folder / only
        raise repository.not_cached(error) from error
    file = next(iter(repository.download(files).values()))
    return file.parent if _is_standard(file.name) else file  # the folder contains the JSON files, too


def choose_files(address: str, files: Mapping[str, _File]) -> dict[str, _File]:
    """Return the files of one checkpoint, in the safest format available, and its JSON files."""
    standard = [name for name in _CHECKPOINTS if name in files or f"{name}.index.json" in files]
    name = standard[0] if standard else _only_checkpoint(files)
    if name is None:
        listed = ", ".join(sorted(files)[:8]) or "no files"
        raise WeightsError(f"hf:{address} does not contain a single checkpoint (got {listed}).")
    chosen = [name]
    if name not in files:
        stem, suffix = name.split(".")
        shards = (file for file in files if file.startswith(f"{stem}-") and file.endswith(f".{suffix}"))
        chosen = [f"{name}.index.json", *shards]
    return {file: files[file] for file in (*chosen, *_SIDECARS) if file in files}


def _only_checkpoint(files: Iterable[str]) -> str | None:
    """Return the only file of the safest format that has exactly one at the top level."""
    for suffix in (".safetensors", ".npz", ".pth", ".pt"):
        names = [name for name in files if name.endswith(suffix) and "/" not in name]
        if len(names) == 1:
            return names[0]
    return None


def _is_standard(name: str) -> bool:
    return name.removesuffix(".index.json") in _CHECKPOINTS
