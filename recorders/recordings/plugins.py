"""What other packages offer by entry points: visualizers, lenses and reducers.

A package declares, for example, `[project.entry-points."recorders.visualizers"] cinema = "acme.show:Cinema"`. Nothing is imported
until somebody asks for that name, and reducers only by `import_reducers`: files of recordings name reducers, and a file must not
decide what is imported.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from recorders.errors import PluginError
from reducers import Reducer

Group: TypeAlias = Literal["visualizers", "lenses", "reducers"]


class _Offer(NamedTuple):
    package: str
    entry: importlib.metadata.EntryPoint

    def title(self, group: Group) -> str:
        """What it is, for messages."""
        return f"{self.entry.name!r}, which the package {self.package} offers as one of recorders.{group} ({self.entry.value}),"

    def load(self, group: Group) -> Any:
        """Imports it; raises `PluginError` for whatever its package raises."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:
            what = f"cannot be imported: {type(error).__name__}: {error}; mend or remove that package"
            raise PluginError(f"{self.title(group)} {what}") from error


def plugin(group: Group, name: str, kind: Any, *arguments: Any) -> Any | None:
    """What a package makes that offers something under a name; None if none does. Only this package is imported.

    Args:
        kind: the class of what is made.
        arguments: for what is offered, a class or a function.

    Raises:
        PluginError: it cannot be imported, fails, or makes something else; or several packages offer something of this name.
    """
    found = {offer.entry.value: offer for offer in _offers(group) if offer.entry.name == name}
    if len(found) > 1:
        packages = " and ".join(sorted(offer.package for offer in found.values()))
        raise PluginError(f"{packages} both offer {name!r} as one of recorders.{group}: remove one, or import the one you mean")
    for offer in found.values():
        make = offer.load(group)
        try:
            made = make(*arguments)
        except Exception as error:
            raise PluginError(f"{offer.title(group)} failed: {type(error).__name__}: {error}") from error
        if not isinstance(made, kind):
            raise PluginError(f"{offer.title(group)} makes no {kind.__name__}, but {made!r:.100}")
        return made
    return None


def names_of_plugins(group: Group) -> list[str]:
    """The names that packages offer; imports nothing."""
    return sorted({offer.entry.name for offer in _offers(group)})


def import_reducers() -> dict[str, type[Reducer]]:
    """Imports the reducers that installed packages offer, so that recordings with them compute and merge; returns them by name.

    Without it, `load` gives a reducer of a package that was not imported as its saved values, with a warning.

    Raises:
        PluginError: some cannot be imported, or are no reducers; the others are imported all the same.

    >>> import_reducers()
    {}
    """
    found, broken = dict[str, type[Reducer]](), list[str]()
    for offer in _offers("reducers"):
        try:
            cls = offer.load("reducers")
        except PluginError as error:
            broken.append(str(error))
            continue
        if isinstance(cls, type) and issubclass(cls, Reducer):
            found[offer.entry.name] = cls
        else:
            broken.append(f"{offer.title('reducers')} is no class of reducers, but {cls!r:.100}")
    if broken:
        raise PluginError("; ".join(broken))
    return found


def _offers(group: Group) -> Iterator[_Offer]:
    """The entry points of all packages, each package once, as importing would find it. What cannot be read offers nothing."""
    seen = set[str]()
    for package in importlib.metadata.distributions():
        try:
            name = package.metadata["Name"]
            entries = [] if name in seen else list(package.entry_points.select(group=f"recorders.{group}"))
        except Exception:  # of one package, of which the others know nothing
            continue
        seen.add(name)
        yield from (_Offer(name, entry) for entry in entries)
