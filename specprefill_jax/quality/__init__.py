"""Quality: tasks whose answers are known, their evaluation, and the calibration of a scorer on a given draft."""
