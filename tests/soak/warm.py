"""Start ranks quickly: a process that has imported torch forks them.

Most of a rank's start is the import of torch. So mpirun starts stubs, small programs that ask a `Nursery` for a process
with their environment, directory, output and arguments. The nursery forks one, which then starts MPI as the rank that
its stub was to be. A signal to the stub reaches the rank, the end of one ends the other, and the stub ends as its rank
did, so that mpirun sees what it would see without them.

    python -I -S warm.py SOCKET MODULE ARGUMENT...      a stub
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HEADER = struct.Struct("<q")


def stub(path: str, arguments: list[str]) -> None:
    """Ask for a rank and end as it ends."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    request = json.dumps({"environ": dict(os.environ), "cwd": os.getcwd(), "arguments": arguments}).encode()
    socket.send_fds(line, [HEADER.pack(len(request))], [0, 1, 2])
    line.sendall(request)
    (pid,) = HEADER.unpack(receive(line, HEADER.size))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: forward(pid, number))
    (status,) = HEADER.unpack(receive(line, HEADER.size))
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def forward(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def receive(line: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes; ends this process if the other side is gone."""
    found = b""
    while len(found) < count:
        part = line.recv(count - len(found))
        if not part:
            sys.exit("warm.py: the other side is gone")
        found += part
    return found


if __name__ == "__main__":
    stub(sys.argv[1], sys.argv[2:])
