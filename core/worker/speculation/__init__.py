"""Speculative decoding in the worker: drafts are verified, and proposed."""
