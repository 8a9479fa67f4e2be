"""Tests of `tools/testnet`: the environment of ranks, links that limit, lose and delay, and the cleanup."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import testnets
from testnets import IMPOSSIBLE, TESTNET

pytestmark = pytest.mark.any_torch


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("testnet")}


def _namespaces_of(net: str) -> set[str]:
    return {name for name in _namespaces() if name.startswith(f"{net}-")}


def _has_ended(pid: int) -> bool:
    try:
        state = pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # a zombie, which its parent has not waited for


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n")[:-1])


# ---- environment and links

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")


def test_ranks_get_environment_variables() -> None:
    testnets.skip_without()
    code = f"import os; os.write(1, (' '.join(os.environ[name] for name in {VARIABLES}) + chr(10)).encode())"
    assert _lines(testnets.run(["2", "2", "1gbit"], testnets.python(code))) == [
        "0 0 4 2 10.77.0.1 e0",
        "1 1 4 2 10.77.0.1 e0",
        "2 0 4 2 10.77.0.1 e0",
        "3 1 4 2 10.77.0.1 e0",
    ]


# Each other rank sends to rank 0 and prints whether its node's interface sent as many bytes meanwhile.
TRANSFER = r"""
import os, pathlib, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
node = rank // int(os.environ["LOCAL_WORLD_SIZE"])
sent = pathlib.Path("/sys/class/net/e0/statistics/tx_bytes")
size = 1 << 20
if rank == 0:
    server = socket.create_server(("10.77.0.1", 5000), backlog=world)
    for _ in range(world - 1):
        peer = server.accept()[0]
        while peer.recv(1 << 16):
            pass
        peer.close()
else:
    before = int(sent.read_text())
    while True:
        try:
            to = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    begin = time.monotonic()
    to.sendall(bytes(size))
    to.shutdown(socket.SHUT_WR)
    to.recv(1)
    os.write(1, f"{rank} {int(sent.read_text()) - before >= size} {time.monotonic() - begin}\n".encode())
"""


def test_only_traffic_between_nodes_is_limited() -> None:
    testnets.skip_without()
    lines = _lines(testnets.run(["2", "2", "20mbit"], testnets.python(TRANSFER)))
    went_out = {rank: out for rank, out, _ in map(str.split, lines)}
    assert went_out == {"1": "False", "2": "True", "3": "True"}


def test_link_is_no_faster_than_its_rate() -> None:
    testnets.skip_without()
    ((_, _, seconds),) = map(str.split, _lines(testnets.run(["2", "1", "20mbit"], testnets.python(TRANSFER))))
    at_once = 1 << 17  # the largest burst in bytes
    assert float(seconds) >= ((1 << 20) - at_once) * 8 / 20e6


ECHO = """
import os, socket, sys, time
port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
count = 200
if os.environ["RANK"] == "0":
    port.bind(("10.77.0.1", 5000))
    port.settimeout(20)
    while True:
        data, sender = port.recvfrom(100)
        port.sendto(data, sender)
        if data == b"end":
            break
else:
    port.settimeout(1)
    while True:  # until the other one is there, and addresses are known
        try:
            port.sendto(b"0", ("10.77.0.1", 5000))
            port.recv(100)
            break
        except (TimeoutError, ConnectionRefusedError):
            pass
    time.sleep(0.2)
    port.setblocking(False)
    try:
        while True:
            port.recv(100)
    except BlockingIOError:
        port.settimeout(1)
    begin, answers, soonest = time.monotonic(), [], 1e9
    for n in range(count):
        port.sendto(str(n).encode(), ("10.77.0.1", 5000))
    try:
        while True:
            data = port.recv(100)
            soonest = min(soonest, time.monotonic() - begin)
            answers.append(int(data))
    except TimeoutError:
        pass
    print(len(answers), answers == sorted(answers), soonest)
    late = [(before, n) for before, n in zip(answers, answers[1:]) if n < before]
    print("late:", *late, file=sys.stderr)
    for _ in range(100):
        port.sendto(b"end", ("10.77.0.1", 5000))
"""


@pytest.mark.long
def test_delay_and_jitter_keep_the_order() -> None:
    testnets.skip_without()
    done = testnets.run(["2", "1", "1gbit", "20ms", "--jitter", "5ms"], testnets.python(ECHO))
    ((answers, in_order, soonest),) = map(str.split, _lines(done))
    assert (answers, in_order) == ("200", "True"), done.stderr
    assert float(soonest) >= 2 * (20 - 5) / 1000


@pytest.mark.long
def test_link_loses_messages() -> None:
    testnets.skip_without()
    done = testnets.run(["2", "1", "1gbit", "--loss", "30%"], testnets.python(ECHO))
    ((answers, _, _),) = map(str.split, _lines(done))
    assert 20 < int(answers) < 180, "of 200, expected are 98"


LINK = f"""
import os, pathlib, subprocess, time
carrier = pathlib.Path("/sys/class/net/e0/carrier")
def wait_for(value):
    until = time.monotonic() + 20
    while carrier.read_text().strip() != value:
        assert time.monotonic() < until, f"the link is not {{value}}"
        time.sleep(0.01)
def link(state):
    subprocess.run([{str(TESTNET)!r}, "link", "1", state], check=True)
if os.environ["RANK"] == "1":
    link("down")
    wait_for("0")
    link("up")
    wait_for("1")
else:
    assert carrier.read_text().strip() == "1"
"""


def test_rank_takes_link_down_and_up() -> None:
    testnets.skip_without()
    assert testnets.run(["2", "1", "1gbit"], testnets.python(LINK)).returncode == 0


# ---- termination


def test_exit_status_is_that_of_failed_rank_and_others_are_stopped() -> None:
    testnets.skip_without()
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)"
    done = testnets.run(["2", "1", "1gbit", "--grace", "0.2"], testnets.python(code))
    assert done.returncode == 7
    assert "ends ranks [0], 0.2 s after another one failed" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("relayed", [[], ["1ms", "--loss", "1%"]], ids=["bridge", "relay"])
def test_signal_leaves_nothing_behind(number: signal.Signals, relayed: list[str], tmp_path: pathlib.Path) -> None:
    testnets.skip_without()
    # The rank's child ignores termination signals.
    code = (
        "import os, pathlib, subprocess; "
        "child = subprocess.Popen(['bash', '-c', 'trap \"\" TERM INT HUP; while true; do sleep 1; done']); "
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(child.pid)); child.wait()"
    )
    command = [str(TESTNET), "2", "1", "1gbit", *relayed, "--", *testnets.python(code)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = [tmp_path / "0", tmp_path / "1"]
    until = time.monotonic() + 60
    while not all(child.exists() and child.read_text() for child in children):
        assert time.monotonic() < until and running.poll() is None, running.communicate()[1]
        time.sleep(0.05)
    assert len(_namespaces_of(f"testnet{running.pid}")) == 3
    running.send_signal(number)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 128 + number, said
    assert _namespaces_of(f"testnet{running.pid}") == set()
    for child in children:
        assert _has_ended(int(child.read_text()))


def test_failed_setup_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    testnets.skip_without()
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'no such qdisc' >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    command = [str(TESTNET), "2", "1", "1gbit", "--", "true"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == IMPOSSIBLE
    assert "tc -n testnet" in said and "no such qdisc" in said
    assert _namespaces_of(f"testnet{running.pid}") == set()


# ---- missing requirements and wrong arguments


def test_missing_iproute2_is_reported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    done = testnets.run(["2", "1", "1gbit"], ["true"], environment={"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (IMPOSSIBLE, "")
    assert "there is no `ip` here; install iproute2" in done.stderr


def test_missing_root_is_reported() -> None:
    testnets.skip_without()  # iproute2 is installed
    command = [str(TESTNET), "2", "1", "1gbit", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, user=65534, timeout=60)
    if done.returncode == 126 or "Permission denied" in done.stderr:
        pytest.skip("another user may not read the source tree")
    assert done.returncode == IMPOSSIBLE
    assert "needs root, to make network namespaces; this is user 65534" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["2", "1", "1gbit"], "COMMAND must be given after --"),
        (["2", "1", "1gbit", "--"], "COMMAND must be given after --"),
        (["2", "0", "1gbit", "--", "true"], "PER_NODE: must be in [1, 256], got '0'"),
        (["x", "1", "1gbit", "--", "true"], "NODES: must be in [1, 64], got 'x'"),
        (["2", "1", "fast", "--", "true"], "RATE: must be a number and one of bit, kbit, mbit, gbit"),
        (["2", "1", "1bit", "--", "true"], "RATE: must be in [10kbit, 100gbit], got '1bit'"),
        (["2", "1", "1gbit", "5", "--", "true"], "DELAY: must be a number and one of us, ms, s"),
        (
            ["2", "1", "1gbit", "--loss", "100%", "--", "true"],
            "--loss: must be at least 0% and less than 100%, got '100%'",
        ),
        (
            ["2", "1", "1gbit", "1ms", "--jitter", "2ms", "--", "true"],
            "--jitter must be at most DELAY (0.001 s), got 0.002 s",
        ),
        (["64", "16", "1gbit", "--", "true"], "NODES x PER_NODE must be at most 256, got 1024"),
        (["link", "0", "sideways"], "invalid choice: 'sideways'"),
        (["link", "0", "up"], "--net must be the name that testnet prints, got none"),
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], error: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TESTNET"}
    done = subprocess.run([str(TESTNET), *arguments], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert error in done.stderr
