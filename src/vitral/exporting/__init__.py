"""Networks as files that other programs run: exported, and proven to answer the same."""
