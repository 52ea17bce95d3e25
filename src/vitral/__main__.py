"""``python -m vitral``."""

from vitral.cli.main import main

if __name__ == "__main__":
    main()
