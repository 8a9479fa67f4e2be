"""The command line, ``shardwright``: a module for each command, and parsers.py and options.py for all."""
