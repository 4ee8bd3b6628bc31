"""A checkpoint that is being written: its files, perhaps by a thread, then its manifest, which makes it one."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import onefile, store
from mpisparse.checkpoint.h5file import Arrays, Damaged, FileRecord, write_file
from mpisparse.checkpoint.state import ArrayCopies
from mpisparse.comm.roll_call import meet
from mpisparse.errors import CheckpointError

Files = dict[str, tuple[Arrays, dict[str, str]]]  # arrays and texts, by the name of the file


class Saving:
    """A checkpoint that is being written; finish() completes it. Created by begin_save()."""

    def __init__(
        self, exchange: Any, directory: Path, place: Path, manifest: store.Manifest, keep: int | None, *,
        owns_exchange: bool, memory: ArrayCopies, driver: str | None,
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._owns_exchange = owns_exchange
        self._directory = directory
        self._place = place
        self._manifest = manifest
        self._keep = keep
        self._memory = memory
        self._driver = driver
        self._records: list[FileRecord] = []
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def _write(self, files: Files) -> None:
        try:
            if self._driver == "mpio":
                self._records = onefile.write_parts(self._exchange, self._place, files)
                return
            for name, (arrays, texts) in files.items():
                self._records.append(write_file(self._place / name, arrays, texts))
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _start(self, files: Files, *, background: bool) -> None:
        if not background:
            self._write(files)
            return
        self._thread = threading.Thread(target=self._write, args=(files,), name="mpisparse-checkpoint", daemon=False)
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank's files are on disk; local."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait for all ranks' files and complete the checkpoint; collective. Raises CheckpointError on all ranks."""
        with self._exchange.place.exempt("saving"):
            meet(self._exchange, "finish() of a checkpoint")
            return self._finish()

    def _finish(self) -> Path:
        if self._thread is not None:
            self._thread.join()
        report = {"error": self._error, "files": [asdict(record) for record in self._records]}
        reports = [json.loads(text) for text in self._exchange.gather_texts(json.dumps(report))]
        errors = [f"r{rank} | {r['error']}" for rank, r in enumerate(reports) if r["error"]]
        outcome, replaced = "", None
        if self._exchange.rank == 0:
            replaced = self._of_another_model()
            outcome = self._complete(reports, errors)
        outcome = self._exchange.gather_texts(outcome)[0]
        if self._owns_exchange:
            self._exchange.close()
        if outcome:
            raise CheckpointError(
                f"checkpoint {store.name_of(self._manifest.step)} could not be written ({outcome}); older ones are intact"
            )
        if replaced is not None:
            warnings.warn(
                f"{replaced} was a checkpoint of another model, and is replaced: give each model a directory of its own",
                stacklevel=2,
            )
        return self._directory / store.name_of(self._manifest.step)

    def abandon(self) -> None:
        """Wait for this rank's files, and on rank 0 remove the checkpoint; local. For a run that ends in an error."""
        if self._thread is not None:
            self._thread.join()
        if self._exchange.rank == 0:
            store.discard(self._place)

    def _of_another_model(self) -> Path | None:
        """On rank 0: the checkpoint that this one replaces, if it is of another model: two may share a directory."""
        replaced = self._directory / store.name_of(self._manifest.step)
        with contextlib.suppress(Damaged, OSError):
            if store.read_manifest(replaced).model != self._manifest.model:
                return replaced
        return None

    def _complete(self, reports: list[dict[str, Any]], errors: list[str]) -> str:
        """On rank 0: give the checkpoint its final name, or remove it; returns the errors."""
        try:
            if not errors:
                files = tuple(FileRecord(**record) for report in reports for record in report["files"])
                manifest = store.Manifest(**{**self._manifest.__dict__, "files": files})
                store.complete(self._directory, self._place, manifest, self._keep)
                return ""
        except OSError as error:
            errors = [f"r0 | {error}"]
        store.discard(self._place)
        return "; ".join(errors)
