"""Requests that a browser sends for pages of other sites."""
