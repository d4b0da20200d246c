"""From generated tokens to messages: text, stop strings, the parser chain."""
