"""The lowerings, a family a file. Importing this package fills the table."""

from . import basic, recurrent

__all__ = ["basic", "recurrent"]
