"""`shardwright build`: compiles the sources in the installed package for the installed torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import builds, source_build


def main(argv: Sequence[str]) -> int:
    """Makes a build, also if one exists. Returns 0, or 2 after printing the reason if it cannot be made."""
    parser().parse_args(argv)
    torch_version, _ = builds.torch_versions()
    try:
        if torch_version is None:
            raise ImportError("torch is not installed; install it, then run: shardwright build")
        source_build.build(builds.version(), torch_version)
    except (ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    return argparse.ArgumentParser(
        prog="shardwright build",
        description="Compile shardwright for the installed torch, from the sources in the installed package. The "
        "result goes to $SHARDWRIGHT_CACHE (~/.cache/shardwright) and is loaded from there.",
    )
