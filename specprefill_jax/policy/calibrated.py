"""What a calibration means for requests: whether it can be followed, and whether the draft is asked."""

import logging

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.artifact.manifest import Model
from specprefill_jax.errors import SettingError
from specprefill_jax.scoring import Scorer, check_scorer
from specprefill_jax.settings import Settings

logger = logging.getLogger(__name__)

_DEFAULTS = Settings()


def usable(calibration: Calibration | None, draft: Model | None) -> Calibration | None:
    """A calibration whose settings this version has and the draft can do; said in the log if it is none."""
    try:
        if calibration is not None:
            scorer = Scorer.of(_DEFAULTS.with_defaults(calibration.settings))
            if draft is not None:
                check_scorer(scorer, layers=draft.attention_layers, heads=draft.query_heads, rows=draft.rows)
    except SettingError as error:
        logger.warning("the calibration is ignored; `specprefill calibrate` calibrates again. %s", error)
        return None
    return calibration


def unfit(calibration: Calibration | None) -> str:
    """Why a draft that does not keep what was wanted is not asked; "" where nothing speaks against it."""
    if calibration is None or calibration.reached:
        return ""
    interval = f"{100 * calibration.lower:.1f} to {100 * calibration.upper:.1f}"
    return (
        f"calibration found that {calibration.retention:.1%} ({interval}) of the facts asked for are kept "
        f"whole, where {calibration.wanted:.1%} were wanted; mode sparse or calibration=off run the draft "
        "all the same"
    )
