"""Readers and writers of checkpoint files. They know names, types and shapes, not what a tensor is for."""
