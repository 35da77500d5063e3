"""Names of parametrized tests that are the same in every process."""

from __future__ import annotations

import re

__all__ = ["name_of"]


def name_of(value: object) -> str:
    """The repr of a parameter without addresses, such as that of a function."""
    return re.sub(r"( of type object)? at 0x[0-9a-f]+", "", repr(value))
