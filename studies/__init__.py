"""The paper's experiments at a size that two cores can train: a TOML and a command each; results in docs/results."""
