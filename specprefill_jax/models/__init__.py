"""Qwen3.5 text models in JAX: configuration, checkpoint table, layers, and the entries that are compiled."""
