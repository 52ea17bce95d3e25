"""Load checkpoints of any dialect, save them in any dialect, and report what became of every tensor."""
