"""Moves state dicts from one set of layouts to another: `transfer`."""
