"""Serve time: open a device, load an artifact's programs onto it, call them, keep their state there."""
