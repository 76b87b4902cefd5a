"""A value imported by the package's train module."""

NAME = "values"
