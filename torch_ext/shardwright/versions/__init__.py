"""Successive versions of the tensors of a transfer: a second copy of them, and the elements that changed."""
