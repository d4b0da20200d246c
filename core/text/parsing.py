"""Public face of output parsing; see `core/output_parsing/output_parser.py`."""

from ..output_parsing.output_parser import OutputParser, ParsedMessage, ParsedToolCall, fold

__all__ = ["OutputParser", "ParsedMessage", "ParsedToolCall", "fold"]
