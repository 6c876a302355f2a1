"""The lowerings, a family a file. Importing this package fills the table."""

from . import basic

__all__ = ["basic"]
