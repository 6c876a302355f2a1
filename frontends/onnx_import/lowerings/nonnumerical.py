"""Operators of the default domain that are not about numbers, each with the reason."""

from __future__ import annotations

from ..registry import outside

TEXT = "strings are outside numerical graphs"

outside(TEXT, "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit")
outside("counts words of a text, outside numerical graphs", "TfIdfVectorizer")
outside("decodes an image file, outside numerical graphs: decode before the model", "ImageDecoder")
