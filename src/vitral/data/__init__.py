"""Pictures to tensors: find them, look them over, decode, prepare, augment, and load them in a repeatable order."""
