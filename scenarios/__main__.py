"""``python -m scenarios`` is the same as ``meshwise``."""

from scenarios.command_line import main

if __name__ == "__main__":
    main()
