"""Numbers that can be trusted: metrics, and running a model over a split."""
