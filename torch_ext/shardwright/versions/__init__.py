"""Successive versions of the tensors of a transfer."""
