"""Training: settings, automatic choices, optimizers, resumable state and the loop."""
