"""Recorder: selects modules of a net, puts monitors on them, and reports what they record and cost."""
