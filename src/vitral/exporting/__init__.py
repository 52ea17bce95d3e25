"""Export models to formats that other runtimes read, and verify that the outputs are equal."""
