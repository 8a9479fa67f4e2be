"""Adapters to other libraries, one module for each. docs/integrations.md describes them.

`torchtitan` and `transformers` import their libraries; this package and `linears` need none of them.
"""
