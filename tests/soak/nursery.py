"""The process that forks ranks for the stubs of warm.py, after the slow imports and before MPI starts.

python nursery.py SOCKET MODULE...      import modules, which must not start MPI, and serve until standard input ends

The first argument of a stub is a module, whose main() is called with the others in sys.argv.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

from tests.soak.warm import HEADER, receive


def serve(path: str) -> None:
    """Fork a rank for each stub that connects, until standard input ends."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(path)
    door.listen(64)
    wake, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_end)
    watched = selectors.DefaultSelector()
    for source in (door, sys.stdin, wake):
        watched.register(source, selectors.EVENT_READ)
    lines: dict[int, socket.socket] = {}  # by the rank's process id
    print("ready", flush=True)
    while True:
        for key, _ in watched.select():
            if key.fileobj is sys.stdin:
                for pid in lines:
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is door:
                line, _ = door.accept()
                pid = fork_rank(line, [door, *lines.values()], watched)
                lines[pid] = line
                watched.register(line, selectors.EVENT_READ, pid)
            elif key.fileobj == wake:
                os.read(wake, 4096)
            elif key.data in lines:  # a stub died, as mpirun kills what is left of a job
                os.kill(key.data, signal.SIGKILL)
                watched.unregister(key.fileobj)
        bury(lines, watched)


def bury(lines: dict[int, socket.socket], watched: selectors.BaseSelector) -> None:
    """Tell the stubs of ranks that ended how they ended."""
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        line = lines.pop(pid)
        try:
            watched.unregister(line)
            line.sendall(HEADER.pack(status))
        except (KeyError, OSError):
            pass  # the stub died first
        line.close()


def fork_rank(line: socket.socket, inherited: list[socket.socket], watched: selectors.BaseSelector) -> int:
    """Fork a process that becomes the rank of a stub; returns its id."""
    header, descriptors, _, _ = socket.recv_fds(line, HEADER.size, 3)
    request = json.loads(receive(line, *HEADER.unpack(header)))
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        line.sendall(HEADER.pack(pid))
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched.close()
    for other in (line, *inherited):
        other.close()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    module, *sys.argv[1:] = request["arguments"]
    sys.argv[0] = module.partition(".")[0]
    sys.exit(importlib.import_module(module).main())  # through the ends of this interpreter, which finalizes MPI


if __name__ == "__main__":
    sys.path[:0] = [str(Path.cwd())]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(sys.argv[1])
