"""Tokenizer, incremental detokenizer, chat templates."""
