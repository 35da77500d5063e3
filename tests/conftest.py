"""Fixtures for tests at any depth. The helpers beside this file are imported by name: see `pythonpath` in pyproject.toml."""
