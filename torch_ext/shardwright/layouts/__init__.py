"""Layouts of tensors on meshes, and the values that describe them. Nothing here imports torch."""
