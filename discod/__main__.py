"""``python -m discod``."""

from discod.cli import main

if __name__ == "__main__":
    main()
