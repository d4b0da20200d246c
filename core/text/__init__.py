"""Tokenizer, incremental detokenizer, chat templates, stop strings."""
