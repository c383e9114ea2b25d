"""The manifest of an artifact: one schema, one reader, one writer.

An artifact is a directory for one device: `manifest.json`, a compiled module and a parameter archive per
model, the tokenizer and the chat template. The manifest says how to call the modules, which device they are
for, how to prove that they compute right there, and how to build the same bytes again.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from specprefill_jax.artifact import strict
from specprefill_jax.errors import ArtifactError, FileMissing

SCHEMA = 2
MANIFEST_NAME = "manifest.json"
DRIVERS = ("local-task", "vulkan", "hip")
NUMERICS = ("f32", "bf16", "f16")
ROLES = ("draft", "target")
ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
COMPILER, RUNTIME = "iree-base-compiler", "iree-base-runtime"


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of a model's state. Dimension "C" stands for the cache capacity of the entry called."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    @property
    def grows(self) -> bool:
        """Whether it holds one entry per slot (keys and values); delta states do not."""
        return "C" in self.shape

    def shape_at(self, capacity: int) -> tuple[int, ...]:
        """Its shape in the entries of one capacity (slots)."""
        return tuple(capacity if size == "C" else int(size) for size in self.shape)

    def bytes_at(self, capacity: int) -> int:
        """Its size in the entries of one capacity (slots)."""
        return math.prod(self.shape_at(capacity)) * ELEMENT_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Model:
    """How to call one compiled model.

    Tokens can stand at positions 0..`positions`-1. `rows` (R) counts the query rows that `prefill_rows`
    returns; 0 means that the model returns no rows.
    An entry `prefill_T{T}_C{C}` exists for every block length T and capacity C with T <= C.
    `largest_parameter` is the size of the largest weight in bytes: each is an allocation of its own.
    `largest_buffer` is that of the largest buffer that a call of an entry allocates; 0 in builds for a CPU,
    where nothing limits it.
    `self_test` names the file of the self-test (see `artifact.self_test`).
    """

    module: str
    parameters: str
    numerics: str
    layers: int
    hidden: int
    vocabulary: int
    positions: int
    attention_layers: int
    query_heads: int
    rows: int
    blocks: tuple[int, ...]
    capacities: tuple[int, ...]
    state: tuple[StateTensor, ...]
    largest_parameter: int
    largest_buffer: int
    self_test: str | None

    def state_bytes(self, capacity: int) -> int:
        """Device memory of a state of `capacity` slots."""
        return sum(tensor.bytes_at(capacity) for tensor in self.state)

    @property
    def largest_allocation(self) -> int:
        """The largest single buffer that it needs in its largest entries, in bytes."""
        states = (tensor.bytes_at(self.capacities[-1]) for tensor in self.state)
        return max([self.largest_parameter, self.largest_buffer, *states])


@dataclasses.dataclass(frozen=True)
class DeviceTarget:
    """What the modules were compiled for.

    `cpu_features` are the /proc/cpuinfo flags that the code needs; `cpu` is the CPU that it was compiled on
    where the target is "host". `device_match` is a regular expression to be found in the name of the Vulkan
    device, case aside; "" accepts any. The shaders ask for `subgroup_sizes` and use `features`, both in the
    words in which IREE describes a Vulkan device.
    """

    name: str
    driver: str
    target: str
    cpu: str
    cpu_features: tuple[str, ...]
    device_match: str
    subgroup_sizes: tuple[int, ...]
    features: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Proof:
    """Kind "self-test": each model carries one. Kind "none": `reason` says why it must not be run."""

    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The content a file must have."""

    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Build:
    """What is needed to rebuild the artifact to the same bytes."""

    recipe: Mapping[str, object]
    tools: Mapping[str, str]
    flags: Mapping[str, object]
    stablehlo: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The whole of manifest.json. `files` lists every file of the artifact but the manifest itself."""

    schema: int
    name: str
    device: DeviceTarget
    proof: Proof
    minimum_tokens: int
    tokenizer: str
    chat_template: str
    stop_ids: tuple[int, ...]
    models: Mapping[str, Model]
    files: Mapping[str, FileEntry]
    build: Build

    @property
    def least_bytes(self) -> int:
        """Device memory below which nothing can run: the weights, and each model's smallest state."""
        archives = {model.parameters for model in self.models.values()}
        states = sum(model.state_bytes(model.capacities[0]) for model in self.models.values())
        return states + sum(self.files[name].bytes for name in archives)

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check `manifest.json` of an artifact directory.

        Raises:
            FileMissing: there is no such directory.
            ArtifactError: the manifest is missing, is not valid JSON, or does not follow the schema.
        """
        path = directory / MANIFEST_NAME
        if not directory.is_dir():
            raise FileMissing(f"no artifact at {directory}: the directory does not exist")
        if not path.is_file():
            raise ArtifactError(
                f"{directory} is not an artifact: it has no {MANIFEST_NAME}. "
                "`specprefill compile RECIPE` writes an artifact."
            )
        return cls.from_json(strict.read_json(path), str(path))

    @classmethod
    def from_json(cls, document: object, where: str = MANIFEST_NAME) -> "Manifest":
        """The manifest held in parsed JSON; `where` begins each error message.

        Raises:
            ArtifactError: it does not follow the schema.
        """
        schema = document.get("schema") if isinstance(document, Mapping) else None
        if isinstance(document, Mapping) and schema != SCHEMA:
            raise ArtifactError(
                f"{where}: schema {schema!r}, but this version reads schema {SCHEMA}. "
                "Compile the artifact again with this version of specprefill."
            )
        manifest = _with_default_proof_reason(document)
        try:
            decoded = strict.decode(cls, manifest, "manifest")
            _check(decoded)
        except ArtifactError as error:
            raise ArtifactError(f"{where}: {error}") from error
        return decoded

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; `from_json` gives the same manifest back."""
        return dataclasses.asdict(self)

    def write(self, directory: Path) -> Path:
        """Check the manifest and write it to `directory`; the same manifest gives the same bytes.

        Raises:
            ArtifactError: it does not follow the schema.
        """
        document = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        Manifest.from_json(json.loads(document))
        path = directory / MANIFEST_NAME
        path.write_text(document, encoding="utf-8")
        return path


def _with_default_proof_reason(document: object) -> object:
    """A proof of kind "self-test" may leave its reason out."""
    if isinstance(document, Mapping) and isinstance(document.get("proof"), Mapping):
        return {**document, "proof": {"reason": "", **document["proof"]}}
    return document


def _check(manifest: Manifest) -> None:
    """What types alone cannot say."""
    device = manifest.device
    _require(device.driver in DRIVERS, f"device.driver {device.driver!r} is none of {', '.join(DRIVERS)}")
    try:
        re.compile(device.device_match)
    except re.error as error:
        raise ArtifactError(
            f"device.device_match {device.device_match!r} is not a regular expression: {error}"
        ) from error
    proof = manifest.proof
    _require(proof.kind in ("self-test", "none"), f"proof.kind {proof.kind!r} is neither self-test nor none")
    _require(proof.kind == "self-test" or proof.reason != "", "proof none needs a reason")
    _require(manifest.minimum_tokens >= 0, f"minimum_tokens {manifest.minimum_tokens} is negative")
    _require(len(manifest.models) > 0, "models is empty")
    for tool in (COMPILER, RUNTIME):
        _require(tool in manifest.build.tools, f"build.tools lacks {tool}")
    for name, entry in manifest.files.items():
        path = PurePosixPath(name)
        _require(
            not path.is_absolute() and ".." not in path.parts and "\\" not in name and name != MANIFEST_NAME,
            f"files: {name!r} is not a relative path of another file inside the artifact",
        )
        _require(
            re.fullmatch("[0-9a-f]{64}", entry.sha256) is not None,
            f"files.{name}.sha256 is not 64 hex digits",
        )
        _require(entry.bytes >= 0, f"files.{name}.bytes is negative")
    for field in ("tokenizer", "chat_template"):
        _require(
            getattr(manifest, field) in manifest.files,
            f"{field} {getattr(manifest, field)!r} is not in files",
        )
    for role, model in manifest.models.items():
        _require(role in ROLES, f"models.{role}: a model is one of {', '.join(ROLES)}")
        _check_model(model, f"models.{role}", manifest)


def _check_model(model: Model, where: str, manifest: Manifest) -> None:
    for field in ("module", "parameters"):
        name = getattr(model, field)
        _require(name in manifest.files, f"{where}.{field} {name!r} is not in files")
    _require(
        model.numerics in NUMERICS, f"{where}.numerics {model.numerics!r} is none of {', '.join(NUMERICS)}"
    )
    for field in ("layers", "hidden", "vocabulary", "positions", "query_heads", "largest_parameter"):
        _require(getattr(model, field) >= 1, f"{where}.{field} must be at least 1")
    _require(model.largest_buffer >= 0, f"{where}.largest_buffer is negative")
    _require(0 <= model.attention_layers <= model.layers, f"{where}.attention_layers is not within 0..layers")
    for field in ("blocks", "capacities"):
        sizes = getattr(model, field)
        ascending = all(a < b for a, b in itertools.pairwise(sizes))
        _require(
            len(sizes) > 0 and sizes[0] >= 1 and ascending, f"{where}.{field} must be positive and ascending"
        )
    _require(
        model.blocks[0] <= model.capacities[0],
        f"{where}: the smallest block, {model.blocks[0]}, exceeds the first capacity {model.capacities[0]}",
    )
    _require(
        0 <= model.rows <= model.blocks[-1],
        f"{where}.rows {model.rows} is not within 0..{model.blocks[-1]}, the largest block",
    )
    _require(
        len({tensor.name for tensor in model.state}) == len(model.state), f"{where}.state repeats a name"
    )
    for tensor in model.state:
        sizes = [size for size in tensor.shape if size != "C"]
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        _require(whole, f'{where}.state {tensor.name}: a dimension is a positive whole number or "C"')
        _require(len(tensor.shape) - len(sizes) <= 1, f'{where}.state {tensor.name} has more than one "C"')
        _require(
            tensor.dtype in NUMERICS, f"{where}.state {tensor.name}: dtype is none of {', '.join(NUMERICS)}"
        )
    if model.self_test is not None:
        _require(model.self_test in manifest.files, f"{where}.self_test {model.self_test!r} is not in files")
    else:
        _require(manifest.proof.kind == "none", f"{where}.self_test is missing, though proof is self-test")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ArtifactError(message)
