"""The command `shardwright trace`: one trace of all ranks, for Perfetto."""

from __future__ import annotations

import argparse
import gzip
import http.server
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..layouts.errors import argument_error
from . import traces

_VIEWER = "https://ui.perfetto.dev"
PORT = 9001  # the only local port from which Perfetto's page loads traces
_PATH = "/trace.json"


def main(argv: Sequence[str]) -> int:
    """Writes the trace, or serves it to a browser on this machine until it has been loaded once.

    Raises ValueError if files cannot be read or written, or if the port is in use.
    """
    arguments = parser().parse_args(argv)
    merged = traces.merge(traces.files_in(arguments.profiles))
    data = json.dumps(merged).encode()
    if arguments.out:
        _write(Path(arguments.out), data)
        print(f"written to {arguments.out}; open it at {_VIEWER}")
    else:
        _serve(data, arguments.port)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(
        prog="shardwright trace",
        description="Merges the profiles that torch.profiler exported on each rank into one trace, and shows it in "
        f"Perfetto ({_VIEWER}), whose page loads it from this machine. Nothing is uploaded.",
    )
    made.add_argument("profiles", metavar="FILE", nargs="+", help="profiles of the ranks, or folders of them")
    made.add_argument("--out", metavar="FILE", help="write the trace (.json or .json.gz) instead of serving it")
    made.add_argument("--port", type=int, default=PORT, help="port on 127.0.0.1; Perfetto needs %(default)s")
    return made


def _write(path: Path, data: bytes) -> None:
    """Writes the trace, compressed if the name ends in .gz. Raises ValueError if that fails."""
    try:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ValueError(f"--out: {path} cannot be written: {error.strerror}") from None


def _serve(data: bytes, port: int) -> None:
    """Serves the trace to programs on this machine until one has loaded it."""
    loaded = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == _PATH
            self._answer(200 if found else 404, data if found else b"")
            if found:
                loaded.append(self.path)

        def do_OPTIONS(self) -> None:  # a browser asks before a public page may load from this machine
            self._answer(204, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Access-Control-Allow-Origin", _VIEWER)
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Prints nothing about requests."""

    if not 0 <= port < 1 << 16:
        raise argument_error("--port", "in [0, 65535]", port)
    try:
        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ValueError(f"--port must be free on 127.0.0.1, got {port}: {error.strerror}") from None
    with server:
        url = f"http://127.0.0.1:{server.server_port}{_PATH}"
        print(f"open {_VIEWER}/#!/?url={url}", flush=True)
        print("The command ends when the trace is loaded; Ctrl-C ends it now.", file=sys.stderr)
        while not loaded:
            server.handle_request()
