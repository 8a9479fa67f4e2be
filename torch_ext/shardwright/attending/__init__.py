"""Attention over a sequence that is cut over ranks; docs/attention.md describes it."""
