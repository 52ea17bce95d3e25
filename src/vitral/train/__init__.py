"""Training: settings, decisions with their reasons, optimisers, what is trained, state that survives, and the loop."""
