"""What the package's train module imports."""

NAME = "values"
