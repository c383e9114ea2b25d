"""Compile time: recipe, export, lowering, weights, artifact. Imports JAX and the IREE compiler."""
