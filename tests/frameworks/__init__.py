"""Paceline inside frameworks: `make test-frameworks` runs these, in an environment that has the frameworks."""
