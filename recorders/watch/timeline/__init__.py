"""Timeline: statistics over time in one SQLite file, each tick a row with a checksum."""

from recorders.watch.timeline.connection import MEMORY
from recorders.watch.timeline.rows import TimelineRows
from recorders.watch.timeline.selection import Row
from recorders.watch.timeline.timeline import Timeline

__all__ = ["MEMORY", "Row", "Timeline", "TimelineRows"]
