"""The programs: one file for each kind of data. Importing this package registers all of them."""

import contextlib
import importlib

for _name in ("vectors", "images", "sequences", "generative", "held_out_vectors", "held_out_images", "held_out_sequences"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"{__name__}.{_name}")
