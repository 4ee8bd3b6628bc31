"""How heartbeats travel outside MPI: as datagrams to rank 0, or as files in the run's directory if those do not get through.

Datagrams need no connection, so one socket of rank 0 serves any number of ranks. Beats are repeated, so losing one is
harmless.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mpisparse.comm.watchdog.beat import LARGEST, Beat, decode, encode, read, seal, unseal

SIOCGIFADDR = 0x8915  # Linux: address of an interface
BUFFER_NBYTES = 4 << 20  # room for the beats of thousands of ranks at once
MOST_NAMES = 8


class LastBeat(NamedTuple):
    """A rank's newest beat, and its age in seconds."""

    beat: Beat
    age: float


class Answer(NamedTuple):
    """Rank 0's answer to a beat: whether any rank is in an exempt phase, whether the job is ending, and its own beat."""

    excused: bool
    ending: bool
    beat: Beat


def open_socket() -> socket.socket | None:
    """Open a socket that receives datagrams from anywhere; None if the system allows none."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
        made = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)
        made.bind(("", 0))
        undo.pop_all()
        return made
    return None


def own_names() -> list[str]:
    """List the IPv4 addresses of this host, and its name if only loopback addresses exist."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                asked = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, asked)[20:24]))
    if all(address.startswith("127.") for address in found):
        found.append(socket.gethostname())
    return found[:MOST_NAMES]


class Mailbox:
    """A socket and the job's key; take() waits for packets, and wake() interrupts it from another thread."""

    def __init__(self, made: socket.socket, key: bytes) -> None:
        self.socket = made
        self.key = key
        self.port = int(made.getsockname()[1])
        self.poll = select.poll()  # select.select() refuses descriptors beyond 1023
        self.poll.register(made, select.POLLIN)

    def post(self, packet: bytes, addresses: Iterable[tuple[str, int]]) -> None:
        """Send a packet; failures count as lost packets."""
        for address in addresses:
            with contextlib.suppress(OSError):
                self.socket.sendto(packet, address)

    def take(self, seconds: float, more: float = 0.0) -> list[tuple[bytes, tuple[str, int]]]:
        """Wait up to `seconds` for a packet, then `more` seconds for others; return all that arrived."""
        if self.poll.poll(1000 * max(0.0, seconds)):
            time.sleep(more)
        packets: list[tuple[bytes, tuple[str, int]]] = []
        with contextlib.suppress(OSError):  # the queue is empty
            while len(packets) < 1000:
                packets.append(self.socket.recvfrom(LARGEST + 1))
        return packets

    def wake(self) -> None:
        """Make take() return."""
        self.post(b"", [("127.0.0.1", self.port)])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Hub:
    """Rank 0's end: receives the beats of all ranks and answers each.

    `pause`: seconds to wait for more beats after the first, so that many ranks do not wake it one by one.
    """

    def __init__(self, mail: Mailbox, ranks: int, pause: float) -> None:
        self.mail = mail
        self.ranks = ranks
        self.pause = pause
        self.newest: dict[int, tuple[Beat, float]] = {}
        self.addresses: dict[int, tuple[str, int]] = {}

    def put(self, beat: Beat) -> None:
        """Store a beat unless a newer one of its rank is known."""
        known = self.newest.get(beat.rank)
        if known is None or known[0].number < beat.number:
            self.newest[beat.rank] = beat, time.monotonic()

    def listen(self, seconds: float, answer: Answer) -> None:
        """Receive beats for up to `seconds`, and answer each."""
        for packet, address in self.mail.take(seconds, self.pause):
            beat = decode(self.mail.key, packet, self.ranks)
            if beat is not None:
                self.put(beat)
                self.addresses[beat.rank] = address
                self._tell(answer, [address])

    def tell_all(self, answer: Answer) -> None:
        """Send the answer to all ranks without waiting for their beats."""
        self._tell(answer, self.addresses.values())

    def _tell(self, answer: Answer, addresses: Iterable[tuple[str, int]]) -> None:
        record = {"excused": answer.excused, "ending": answer.ending, "beat": asdict(answer.beat)}
        self.mail.post(seal(self.mail.key, record), addresses)

    def seen(self) -> dict[int, LastBeat]:
        """Return the newest beat of every rank that has sent one."""
        now = time.monotonic()
        return {rank: LastBeat(beat, now - at) for rank, (beat, at) in self.newest.items()}


class Line:
    """The other ranks' end: sends beats to rank 0, at first to all of its addresses, then to the one that answered."""

    def __init__(self, mail: Mailbox, names: list[str], port: int) -> None:
        self.mail = mail
        self.addresses = [(name, port) for name in names]
        self.answer: Answer | None = None
        self.answered = time.monotonic()  # until the first answer: when this was made

    def send(self, beat: Beat) -> None:
        """Send a beat to rank 0."""
        self.mail.post(encode(self.mail.key, beat), self.addresses)

    def listen(self, seconds: float) -> None:
        """Wait up to `seconds` for an answer."""
        for packet, address in self.mail.take(seconds):
            value = unseal(self.mail.key, packet) or {}
            beat = read(value.get("beat"), 1)
            if beat is not None:
                self.answer = Answer(bool(value.get("excused")), bool(value.get("ending")), beat)
                self.answered = time.monotonic()
                self.addresses = [address]


class Files:
    """Beats as files in a directory that all ranks see, one file per rank."""

    def __init__(self, directory: Path, key: bytes, ranks: int) -> None:
        self.directory = directory
        self.key = key
        self.ranks = ranks

    def put(self, beat: Beat) -> None:
        """Write a beat; failures are ignored."""
        path = self._path(beat.rank)
        with contextlib.suppress(OSError):
            self.directory.mkdir(exist_ok=True)
            unfinished = path.with_suffix(f".{beat.pid}")
            unfinished.write_bytes(encode(self.key, beat))
            os.replace(unfinished, path)

    def seen(self) -> dict[int, LastBeat]:
        """Read the beats of this job. Ages compare this host's clock with that of the file system."""
        found: dict[int, LastBeat] = {}
        for rank in range(self.ranks) if self.directory.is_dir() else ():
            with contextlib.suppress(OSError):
                with self._path(rank).open("rb") as file:
                    packet, written = file.read(LARGEST + 1), os.fstat(file.fileno()).st_mtime
                beat = decode(self.key, packet, self.ranks)
                if beat is not None and beat.rank == rank:
                    found[rank] = LastBeat(beat, max(0.0, time.time() - written))
        return found

    def remove(self, rank: int) -> None:
        """Remove a rank's file, and the directory with the last of them."""
        with contextlib.suppress(OSError):
            self._path(rank).unlink(missing_ok=True)
            self.directory.rmdir()

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank:04}.beat"
