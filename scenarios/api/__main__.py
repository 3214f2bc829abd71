"""``python -m meshwise`` is the same as ``meshwise``."""

from meshwise.scenarios.commands.main import main

if __name__ == "__main__":
    main()
