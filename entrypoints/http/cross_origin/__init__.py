"""Browsers' requests for other sites' pages."""
