"""An evaluation as JSON: all that its tables and its plot follow from, and what it was made with."""

import dataclasses
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from specprefill_jax import __version__
from specprefill_jax.artifact.beside import manifest_digest
from specprefill_jax.engine import Engine
from specprefill_jax.quality.evaluation import Outcome, Plan, Way
from specprefill_jax.quality.summary import summarize
from specprefill_jax.runtime.tune import measured_device

SCHEMA = 1


def to_json(engine: Engine, plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `specprefill eval --json` writes. `outcomes` may be fewer than planned; `complete` says so."""
    manifest, calibration = engine.artifact.manifest, engine.calibration
    described = dataclasses.asdict(plan)
    described["ways"] = [_way(engine, way) for way in plan.ways]
    rows = [dataclasses.asdict(row) for row in summarize(outcomes)]
    for row in rows:
        row["cell"] = row["cell"]._asdict()
        for name in ("accuracy", "difference"):
            row[name] = None if row[name] is None else row[name]._asdict()
    return {
        "schema": SCHEMA,
        "complete": len(outcomes) == len(plan.cells) * plan.count * len(plan.ways),
        "versions": {
            "specprefill-jax": __version__,
            **manifest.build.tools,
            **({"hard-needle": installed} if (installed := _hard_needle()) else {}),
        },
        "artifact": {
            "name": manifest.name,
            "device": manifest.device.name,
            "manifest": manifest_digest(manifest),
            "files": {name: file.sha256 for name, file in manifest.files.items()},
        },
        "calibration": None if calibration is None else dataclasses.asdict(calibration),
        "device": dataclasses.asdict(measured_device(engine.target.device)),
        "plan": described,
        "rows": rows,
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def _way(engine: Engine, way: Way) -> dict[str, Any]:
    """Its settings as they held, with the calibration's, and without where they came from."""
    settings = way.settings
    if engine.calibration is not None and settings.calibration:
        settings = settings.with_defaults(engine.calibration.settings)
    fields = dataclasses.asdict(settings)
    del fields["origins"]
    return {"name": way.name, "settings": fields}


def _hard_needle() -> str | None:
    try:
        return version("hard-needle")
    except PackageNotFoundError:
        return None
