"""The command line: ``shardwright plan``, ``product``, ``transfer``, ``calibrate`` and ``doctor``."""
