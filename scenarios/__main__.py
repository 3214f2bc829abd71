"""``python -m scenarios`` is the same as ``meshwise``."""

from scenarios.commands.main import main

if __name__ == "__main__":
    main()
