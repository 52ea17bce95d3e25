"""Suites: many tasks for one model, each trained and measured by the same protocol."""
