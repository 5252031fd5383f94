"""``python -m paceline`` is the ``paceline`` command."""

from paceline.run.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
