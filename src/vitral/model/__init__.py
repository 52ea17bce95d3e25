"""The network: from an image to logits. Read ``vit.py`` first; it is the paper on one page.

This file imports nothing, so that ``config``, ``sizes`` and ``cost``, which need no torch, stay quick to import.
"""
