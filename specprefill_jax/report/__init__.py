"""Rendering: values in, text for a terminal or HTML out."""
