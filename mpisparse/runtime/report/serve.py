"""A small web server on this host alone that shows runs while they go on."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report.page import page
from mpisparse.runtime.report.read import open_runs

LOOPBACK, PORT = "127.0.0.1", 8765
INTERVAL, PAUSE = 2.0, 5.0  # seconds after which a page asks for a newer one; at least so many times what making it took
NAMES = ("127.0.0.1", "localhost", "::1")  # of this host; others may be a page elsewhere that plays it


class LivePage:
    """The page of some runs, made again whenever their files have changed."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._files = open_runs(runs)
        self._lock = threading.Lock()
        self._state: object = None
        self._page, self._took = ("", b""), 0.0

    def current(self) -> tuple[str, bytes]:
        """Return a tag that changes with the page, and the page; raise ConfigurationError if files are damaged."""
        with self._lock:
            state = [files.state() for files in self._files]
            if state != self._state:
                runs = [files.read(live=True) for files in self._files if files.metrics.is_file()]
                going = [run for run in runs if len(run.steps)]
                begun = {run.name for run in going}
                waiting = [files.run.name for files in self._files if files.run.name not in begun]
                began = time.monotonic()
                text = page(going, live=max(INTERVAL, PAUSE * self._took), waiting=waiting).encode()
                self._took = time.monotonic() - began
                self._page = (hashlib.sha256(repr((os.getpid(), state)).encode()).hexdigest()[:16], text)
                self._state = state
            return self._page


def _asks_for_here(host: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        return urlsplit(f"//{host}").hostname in NAMES
    except ValueError:  # no host name at all
        return False


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page."""

    server: PageServer

    def do_GET(self) -> None:
        """Send the page, or the reason why it cannot be made."""
        if not _asks_for_here(self.headers.get("Host", "")):
            return self._send(403, "text/plain", b"This server answers only to localhost.")
        if urlsplit(self.path).path != "/":
            return self._send(404, "text/plain", b"The page is at /.")
        try:
            tag, body = self.server.live.current()
        except ConfigurationError as error:
            return self._send(503, "text/plain", str(error).encode())
        except OSError as error:
            return self._send(503, "text/plain", f"cannot read {error.filename}: {error.strerror}".encode())
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._send(304, "text/html", b"", tag)
        return self._send(200, "text/html", body, tag)

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

    def _send(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: a page asks every few seconds."""


class PageServer(ThreadingHTTPServer):
    """The server of one page."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        super().__init__((LOOPBACK, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless a browser went away while it was answered."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(runs: Sequence[Path], port: int = PORT) -> PageServer:
    """Return a server that is bound to a port, 0 for any free one, and answers once it runs."""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"expected a port from 0 to 65535, got {port}; 0 takes any that is free")
    files = [run for run in runs if Path(run).is_file()]
    if files:
        raise ConfigurationError(
            f"--serve shows runs while they go on, got {files[0]}, a file; name run directories, or leave --serve out"
        )
    live = LivePage([Path(run) for run in runs])
    try:
        return PageServer(live, port)
    except OSError as error:
        raise ConfigurationError(
            f"expected a free port, got {port} ({error.strerror}); choose another with --port N, or --port 0 for any"
        ) from error


def serve(runs: Sequence[Path], port: int = PORT) -> None:
    """Show runs until Ctrl-C or SIGTERM."""
    with make_server(runs, port) as server, _interrupted_by(signal.SIGTERM):
        print(f"report: {server.address} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


@contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """Let a signal raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
