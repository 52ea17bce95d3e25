"""Serve models: a web page for people and an API for programs."""
