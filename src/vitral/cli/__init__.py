"""The command line: parse, call, show. Each command is a plain function, imported when it is called."""
