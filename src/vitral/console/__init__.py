"""Show results in a terminal: messages, progress and tables. Never imports torch."""
