"""Suites of tasks: VTAB-1k."""
