"""What happens to answers: counted, told on, written, and committed now and then."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from gigamlp.errors import DataError
from gigamlp.measure.clock import HostClock
from gigamlp.score.answers import Answers
from gigamlp.score.blocks import Block, Reject
from gigamlp.score.channel import Busy
from gigamlp.score.manifest import Manifest, beside
from gigamlp.score.places import Place
from gigamlp.score.sinks import Sink, open_append

__all__ = ["Progress", "Seen", "Writer", "failed"]

TELL_S = 0.1  # between two reports of progress

Progress = Callable[[int, int, str], None]

_SHOWN = 10  # rejects in the result


def failed(block: Block, reject: Reject) -> DataError:
    """Return the error that says why `reject` ends the run."""
    where = f", from row {reject.row:,} on" if reject.rows is None else f", row {reject.row:,}"
    if reject.rows is not None and reject.rows > 1:
        where = f", rows {reject.row:,} to {reject.row + reject.rows - 1:,}"
    text = reject.reason if reject.reason.startswith(block.name) else f"{block.name}{where}: {reject.reason}"
    return DataError(f"{text}; --on-error skip leaves such rows out and reports them, what came before is kept")


class Seen:
    """Counts what was computed, and tells it on."""

    def __init__(self, progress: Progress | None, busy: Busy, total: int, before: int) -> None:
        self.rows = self.bytes = 0
        self._progress, self._busy = progress, busy
        self._total, self._before = total, before
        self._begin = self._last = HostClock.now()

    def note(self, rows: int, size: int) -> None:
        """Count `rows` rows of `size` bytes."""
        self.rows += rows
        self.bytes += size
        now = HostClock.now()
        if self._progress is None or now - self._last < TELL_S:
            return
        self._last = now
        took = now - self._begin  # more than 0.1 s
        text = f"{self.rows:,} rows, {self.rows / took:,.0f} rows/s, {self.bytes / took / 1e9:.2f} GB/s"
        text += f", slowest: {self._busy.bottleneck}, busy {self._busy.share(took):.0%} of the time"
        done = self._before + self.rows
        if self._total > done:
            text += f", {(self._total - done) * took / max(self.rows, 1):,.0f} s left"
        self._progress(done, self._total, text)


class Writer:
    """Appends answers and rejects, and commits both now and then."""

    def __init__(self, sink: Sink, out: Place, manifest: Manifest, commit_s: float) -> None:
        self.manifest, self.shown = manifest, list[dict[str, Any]]()
        self._sink, self._commit_s = sink, commit_s
        self._path = beside(out, "manifest.json")
        self._rejects = open_append(beside(out, "rejected.jsonl"), manifest.rejected_bytes)
        self._next = manifest
        self._sound = True
        self._last = HostClock.now()

    def append(self, answers: Answers) -> None:
        """Write a block's answers and rejects; commit if it is time."""
        self._sound = False
        block, rejected = answers.block, 0
        self._sink.append(answers)
        for reject in block.rejects:
            line = _line(block.name, reject, values=self.manifest.on_error == "quarantine")
            self._rejects.write((json.dumps(line) + "\n").encode())
            rejected += reject.rows or 0
            if len(self.shown) < _SHOWN:
                self.shown.append({key: value for key, value in line.items() if key != "values"})
        self._sound = True
        self._next = self._next.to(
            position=block.end,
            rows=self._next.rows + len(block.x),
            rejected=self._next.rejected + rejected,
            bytes=self._sink.size,
            rejected_bytes=self._rejects.size,
        )
        if HostClock.now() - self._last >= self._commit_s:
            self.commit()

    def commit(self, state: str | None = None) -> None:
        """Make all that was appended what a resumed run begins with."""
        self._sink.sync()
        self._rejects.sync()
        made = self._next if state is None else self._next.to(state=state)
        made.save(self._path)
        self.manifest = self._next = made
        self._last = HostClock.now()

    def finish(self) -> None:
        """Commit the end, and give the output its name."""
        if self.manifest.state == "running":
            self._next = self._next.to(bytes=self._sink.size)  # a header alone, if there were no rows
            self.commit("finishing")
        self._sink.finish(self.manifest.rows)
        self._rejects.publish()
        self.manifest = self.manifest.to(state="complete")
        self.manifest.save(self._path)
        self._sink.discard()
        self._rejects.discard()

    def close(self) -> None:
        """Commit what was appended before a failure elsewhere, and close the files."""
        try:
            if self._sound and self.manifest.state == "running" and self._next is not self.manifest:
                self.commit()
        finally:
            self._sink.close()
            self._rejects.close()
            if not self._rejects.size:
                self._rejects.path.unlink(missing_ok=True)


def _line(name: str, reject: Reject, *, values: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"input": name, "row": reject.row, "rows": reject.rows, "reason": reject.reason}
    if values and isinstance(reject.values, list):  # JSON has no NaN
        line["values"] = [v if not isinstance(v, float) or math.isfinite(v) else str(v) for v in reject.values]
    elif values:
        line["values"] = reject.values
    return line
