"""``python -m modelfence`` is the command ``modelfence``."""

from modelfence.cli.main import main

if __name__ == "__main__":
    main()
