"""Adapters to other libraries, one module per library. docs/integrations.md describes them.

Each module imports its library, so importing this package alone needs none of them.
"""
