"""Whether what a folder holds is of the net that is to be saved into it, so that no recording of another one is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from recorders.errors import RecordingExistsError, StorageError
from recorders.recordings.storage.manifest import Manifest
from recorders.recordings.storage.ranks_manifest import read_manifest, read_rank

__all__ = ["check_same_net", "names_at"]


def names_at(root: str, rank: int | None = None) -> Collection[str]:
    """The names in the recording in a folder; of those of a rank, if it is given; none if no manifest of them can be read."""
    try:
        manifest = read_manifest(root, skip=True)
    except (StorageError, OSError):
        return ()
    if isinstance(manifest, Manifest):
        return manifest.lines
    names: dict[str, None] = {}
    for one in manifest.ranks if rank is None else {rank} & manifest.ranks.keys():
        with contextlib.suppress(StorageError, OSError):
            names.update(dict.fromkeys(read_rank(root, manifest, one).lines))
    return names


def check_same_net(names: Collection[str], there: Collection[str], where: str) -> None:
    """Raises `RecordingExistsError` if a recording of the names `there` is that of another net than the one of these names.

    Names are all that tells: of those of the smaller of both recordings, half must be in the other. So one of fewer or of more
    modules of the same net is the same.
    """
    common = set(names).intersection(there)
    if there and 2 * len(common) < max(1, min(len(names), len(there))):
        new, old = ([name for name in some if name not in common][:5] for some in (names, there))
        raise RecordingExistsError(
            f"{where} holds the recording of another net, of {len(there)} subrecorders such as {old}; only {len(common)} of the "
            f"{len(names)} to be saved, such as {new}, are in it: save into another folder, or replace it with overwrite=True"
        )
