"""Where artifacts lie: a directory, a name below ./artifacts or the user's cache, or the embedded demo."""

import hashlib
import importlib.metadata
from pathlib import Path

import platformdirs

from specprefill_jax.artifact.hashing import sha256_of
from specprefill_jax.artifact.host import cpu_flags
from specprefill_jax.artifact.manifest import MANIFEST_NAME
from specprefill_jax.errors import FileMissing

_PACKAGE = Path(__file__).resolve().parents[1]


def cache_folder() -> Path:
    """The folder of this package below the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("specprefill-jax")


def find_artifact(name: str) -> Path:
    """The directory of the artifact called `name`: a path to it, or its name in ./artifacts or the user's
    cache.

    A name is looked up in ./artifacts first, and only a directory with a manifest counts. A path (anything
    with a slash, or a dot) is taken as it is; reading its manifest then says what is wrong with it.

    Raises:
        FileMissing: there is no artifact of that name; the message lists where it was looked for.
    """
    if "/" in name or name in (".", ".."):
        return Path(name)
    places = [Path("artifacts") / name, cache_folder() / "artifacts" / name, Path(name)]
    for place in places:
        if (place / MANIFEST_NAME).is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise FileMissing(
        f"no artifact named {name!r}: no {MANIFEST_NAME} in {looked}. "
        "Give the path of an artifact's directory, or build one with `specprefill compile RECIPE`."
    )


def embedded(name: str) -> Path:
    """A file or folder that comes with the package, by its path in the repository, such as "artifacts/demo".

    A checkout reads it where it lies; an installed wheel carries it inside the package.

    Raises:
        FileMissing: the installation is incomplete.
    """
    places = [_PACKAGE / "embedded" / name, _PACKAGE.parent / name]
    for place in places:
        if place.exists():
            return place
    raise FileMissing(
        f"{name} is missing from this installation of specprefill-jax; install the package again"
    )


def demo_artifact(device: str) -> Path:
    """The cache directory of the embedded demo pair compiled for `device`; it exists once that was compiled.

    Its name carries a digest of what the compiled bytes follow from: the pair, the recipes, the code that
    compiles, the version of IREE (which pins JAX's), and for `cpu` this machine's CPU. So a change of any of
    them leads to a fresh directory, never to a stale module.

    Raises:
        FileMissing: the installation lacks the demo pair.
    """
    digest = hashlib.sha256(importlib.metadata.version("iree-base-runtime").encode())
    if device == "cpu":
        digest.update(" ".join(sorted(cpu_flags())).encode())
    sources = [embedded("artifacts/demo"), embedded("compile")]
    sources += [_PACKAGE / room for room in ("models", "aot", "formats", "artifact")]
    for source in sources:
        for path in sorted(source.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(source).as_posix()} {sha256_of(path)}\n".encode())
    return cache_folder() / "artifacts" / f"demo-{device}-{digest.hexdigest()[:12]}"
