"""How a training run grows with its devices: memory and traffic of each, step time, stragglers and failures."""
