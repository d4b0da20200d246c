"""Anthropic's Messages API over the same engine calls as OpenAI's."""
