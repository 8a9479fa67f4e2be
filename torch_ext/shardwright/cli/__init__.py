"""The command line: ``shardwright plan``, ``matmul``, ``transfer``, ``calibrate`` and ``doctor``."""
