"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["written_whole"]


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write into, which takes its place at the end: a reader never sees half a file.

    Folders are created. If the block raises, what was at `path` stays.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with written_whole(Path(folder, "new", "file.txt")) as draft:
    ...         _ = draft.write_text("all of it")
    ...     Path(folder, "new", "file.txt").read_text()
    'all of it'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.umask(0)
    os.umask(mode)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o666 & ~mode)  # temporary files are for their owner only
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
